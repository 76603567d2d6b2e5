"""Rotary tables, rope_kv_write and paged_attention as plugins, over paged KV pools."""

import numpy as np
import onnx_ir as ir

from llmbuild.builder.targets.tensorrt.limits import KV_LENGTHS, POSITIONS
from llmbuild.builder.targets.tensorrt.lowering import Tensor, optional_input
from llmbuild.builder.targets.tensorrt.paged_limits import BLOCK_TABLES, QUERY_START
from llmbuild.builder.targets.tensorrt.plugin_lowering import PluginLowering
from llmbuild.plugins.common.attention_variant import AttentionShape, pool_type
from llmbuild.plugins.paged_attention import tensorrt as attention_plugins
from llmbuild.plugins.paged_attention.triton import AttentionType
from llmbuild.plugins.rope_kv_write.tensorrt import rope_kv_write as rope_kv_write_plugin
from llmbuild.runtime.manifest import pool_name

KV_DTYPES = ("fp16", "bf16", "int8", "int8-static", "fp8", "int4")  # that kernels read and write


def rope_table(lowering: PluginLowering, node: ir.Node) -> None:
    """[T, R], fp32: rows of a table of every position, which is more exact than what a GPU makes
    of a large angle."""
    frequencies = lowering.values(node.inputs[1]).astype(np.float32)
    positions = np.arange(lowering.paged.capacity, dtype=np.float32)
    angles = (positions[:, None] * frequencies).astype(np.float64)
    table = np.concatenate((np.cos(angles), np.sin(angles)), axis=1)
    table = (table * node.attributes["scale"].as_float()).astype(np.float32)
    positions = lowering.tensor(node.inputs[0])
    rows = lowering.add("gather", lowering.constant(table), positions, 0)
    lowering.tensors[node.outputs[0]] = rows


def unable_rope_table(lowering: PluginLowering, node: ir.Node) -> None:
    raise lowering.refusal(
        node, "frequencies that follow from a sequence's length", "choose target cpu"
    )


def rope_kv_write(lowering: PluginLowering, node: ir.Node) -> None:
    q, k, v = (lowering.tensor(value) for value in node.inputs[:3])
    table = None if node.inputs[3] is None else lowering.tensor(node.inputs[3])
    q_norm, k_norm = node.inputs[4:6]
    if (q_norm is None) != (k_norm is None):
        raise lowering.refusal(node, "a norm of Q or of K alone", "choose target cpu")
    layer = node.attributes["layer"].as_int()
    k_dtype, v_dtype = kv_dtypes(lowering, node, layer)
    channel_scales = _channel_scales(lowering, node, 9)
    plugin = rope_kv_write_plugin(
        lowering.paged.sm,
        _shape(lowering),
        lowering.activations,
        (k_dtype, v_dtype),
        rotary_dim=None if table is None else table.shape[1],
        eps=None if q_norm is None else node.attributes["eps"].as_float(),
        has_channel_scales=bool(channel_scales),
    )
    results = lowering.plugin(
        plugin,
        q=q,
        k=k,
        v=v,
        **({} if table is None else {"table": table}),
        **lowering.optional_fp32(q_norm=q_norm, k_norm=k_norm),
        **{name: lowering.inputs[name] for name in (POSITIONS, QUERY_START, BLOCK_TABLES)},
        **channel_scales,
        **_pools(lowering, layer, k_dtype, v_dtype),
    )
    lowering.tensors |= zip(node.outputs, results, strict=True)


def paged_attention(lowering: PluginLowering, node: ir.Node) -> None:
    layer = node.attributes["layer"].as_int()
    k_dtype, v_dtype = kv_dtypes(lowering, node, layer)
    channel_scales, sinks = _channel_scales(lowering, node, 7), optional_input(node, 6)
    of = AttentionType(
        _shape(lowering),
        lowering.activations,
        k_dtype,
        v_dtype,
        scale=node.attributes["scale"].as_float(),
        window=node.attributes["window"].as_int(),
        soft_cap=node.attributes["soft_cap"].as_float(),
        has_sinks=sinks is not None,
        has_channel_scales=bool(channel_scales),
    )
    sm, splits = lowering.paged.sm, attention_plugins.splits_of(lowering.paged.capacity)
    v_channel_scale = channel_scales.pop("v_channel_scale", None)
    read = {
        "q": lowering.tensor(node.inputs[0]),
        **{name: lowering.inputs[name] for name in (QUERY_START, KV_LENGTHS, BLOCK_TABLES)},
        **channel_scales,
        **_pools(lowering, layer, k_dtype, v_dtype),
    }
    decode = attention_plugins.decode(sm, of, splits)
    partial_out, partial_stats = lowering.plugin(
        decode, token=lowering.tensor(node.inputs[1]), **read
    )
    (lowering.tensors[node.outputs[0]],) = lowering.plugin(
        attention_plugins.prefill(sm, of, splits),
        partial_out=partial_out,
        partial_stats=partial_stats,
        **read,
        **({} if v_channel_scale is None else {"v_channel_scale": v_channel_scale}),
        **lowering.optional_fp32(sinks=sinks),
    )


def kv_dtypes(lowering: PluginLowering, node: ir.Node, layer: int) -> tuple[str, str]:
    """Of K and V of a layer, whose heads have one kind. Raises BuildError for what kernels can't
    read."""
    heads = lowering.paged.kv.layers[layer].heads
    if len(heads) > 1:
        raise lowering.refusal(node, "KV heads of several dtypes", "give a layer's heads one")
    dtypes = (heads[0].k_dtype, heads[0].v_dtype)
    for dtype in dtypes:
        if dtype not in KV_DTYPES:
            remedy = f"choose one of {', '.join(KV_DTYPES)}"
            raise lowering.refusal(node, f"a KV cache in {dtype}", remedy)
    return dtypes


def pool_tensors(lowering: PluginLowering, k_dtype: str, v_dtype: str) -> list[str]:
    """Those that pools of these dtypes have, of POOL_TENSORS."""
    sm = lowering.paged.sm
    types = pool_type(k_dtype, sm).arguments("k") | pool_type(v_dtype, sm).arguments("v")
    return [name for name, kind in types.items() if kind is not None]


def _pools(lowering: PluginLowering, layer: int, k_dtype: str, v_dtype: str) -> dict[str, Tensor]:
    names = pool_tensors(lowering, k_dtype, v_dtype)
    return {name: lowering.inputs[pool_name(layer, name)] for name in names}


def _channel_scales(lowering: PluginLowering, node: ir.Node, slot: int) -> dict[str, Tensor]:
    """K's at this slot and V's at the next; none, or both, as kernels have them: 1 stands where one
    alone is there."""
    values = {
        "k_channel_scale": optional_input(node, slot),
        "v_channel_scale": optional_input(node, slot + 1),
    }
    given = lowering.optional_fp32(**values)
    if len(given) == 1:
        (scale,) = given.values()
        return dict.fromkeys(values, lowering.constant(np.ones(scale.shape, np.float32))) | given
    return given


def _shape(lowering: PluginLowering) -> AttentionShape:
    config = lowering.config
    return AttentionShape(
        config.num_heads, config.num_kv_heads, config.head_dim, lowering.paged.kv.block_size
    )
