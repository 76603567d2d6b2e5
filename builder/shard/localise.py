"""What was decided for the whole model, as a rank's graph needs it: cut, never decided anew."""

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from llmbuild.builder.models.canonical import tensor_splits
from llmbuild.builder.models.config import DecoderConfig
from llmbuild.builder.shard.shard import Shard, own_ranges, span
from llmbuild.quant.plan import QuantPlan
from llmbuild.runtime.manifest import KVLayout

Scales = Mapping[str, NDArray[np.float32]]


def own_plan(plan: QuantPlan, shard: Shard, config: DecoderConfig) -> QuantPlan:
    """The plan with the static scales of the activations that the rank's columns meet."""
    splits = tensor_splits(config)
    scales, groups = {}, dict(plan.activation_groups)
    for name, whole in plan.activation_scales.items():
        group = plan.activation_groups[name]
        columns = (len(whole) * group,)
        ((begin, end),) = own_ranges(shard, config, columns, splits[name][-1:])[0]
        if len(whole) == 1:  # of all columns, so of any
            scales[name], groups[name] = whole, end - begin
        else:
            scales[name] = whole[begin // group : end // group]
    return replace(plan, activation_scales=scales, activation_groups=groups)


def own_kv_scales(scales: Scales, shard: Shard, config: DecoderConfig) -> Scales:
    """The channel scales of a rank's KV heads, by its own number of each layer."""
    own = slice(shard.kv_heads.start * config.head_dim, shard.kv_heads.stop * config.head_dim)
    return {
        f"layers.{index}.{kind}_scale": scales[name][own]
        for index, layer in enumerate(shard.layers)
        for kind in "kv"
        if (name := f"layers.{layer}.{kind}_scale") in scales
    }


def own_kv(kv: KVLayout, shard: Shard) -> KVLayout:
    """What a rank holds of the KV cache."""
    return kv.part(span(shard.layers), span(shard.kv_heads))
