"""Every plugin operation, by the name that step graphs use for it."""

import torch

from llmbuild.plugins.gated_activation.op import gated_activation
from llmbuild.plugins.gather_rows.op import gather_rows
from llmbuild.plugins.linear.op import linear
from llmbuild.plugins.paged_attention.op import paged_attention
from llmbuild.plugins.rms_norm.op import add_rms_norm, rms_norm
from llmbuild.plugins.rope_kv_write.op import kv_write, rope_kv_write, rotary
from llmbuild.plugins.rope_table.op import rope_table

DOMAIN = "llmbuild"

PLUGINS: dict[str, torch._library.custom_ops.CustomOpDef] = {
    op._name: op
    for op in (
        gather_rows,
        linear,
        rms_norm,
        add_rms_norm,
        rope_table,
        rotary,
        kv_write,
        rope_kv_write,
        paged_attention,
        gated_activation,
    )
}
