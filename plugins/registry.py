"""Every plugin operation, by the name that step graphs use for it."""

import torch

from llmbuild.plugins.all_reduce.op import all_reduce
from llmbuild.plugins.gated_activation.op import activation, gated_activation
from llmbuild.plugins.gather_rows.op import gather_quantised_rows, gather_rows
from llmbuild.plugins.layer_norm.op import layer_norm
from llmbuild.plugins.linear.op import linear, quantised_linear
from llmbuild.plugins.moe.op import (
    moe_combine,
    moe_gather,
    moe_linear,
    moe_route,
    moe_sort,
    quantised_moe_linear,
)
from llmbuild.plugins.paged_attention.op import paged_attention
from llmbuild.plugins.rms_norm.op import add_rms_norm, rms_norm
from llmbuild.plugins.rope_kv_write.op import kv_write, rope_kv_write, rotary
from llmbuild.plugins.rope_table.op import (
    dynamic_rope_table,
    rope_table,
    switched_rope_table,
)

DOMAIN = "llmbuild"

PLUGINS: dict[str, torch._library.custom_ops.CustomOpDef] = {
    op._name: op
    for op in (
        gather_rows,
        gather_quantised_rows,
        linear,
        quantised_linear,
        rms_norm,
        add_rms_norm,
        layer_norm,
        rope_table,
        switched_rope_table,
        dynamic_rope_table,
        rotary,
        kv_write,
        rope_kv_write,
        paged_attention,
        activation,
        gated_activation,
        moe_route,
        moe_sort,
        moe_gather,
        moe_linear,
        quantised_moe_linear,
        moe_combine,
        all_reduce,
    )
}
