"""Rotary tables, rope_kv_write and paged_attention: over linear caches, a row for each sequence,
which are inputs and come out updated."""

import numpy as np
import onnx_ir as ir

from llmbuild.builder.targets.tensorrt.limits import (
    KV_LENGTHS,
    POSITIONS,
    WRITE_INDICES,
    cache_name,
)
from llmbuild.builder.targets.tensorrt.lowering import Lowering, Tensor, optional_input
from llmbuild.builder.targets.tensorrt.norms import normalised


def rope_table(lowering: Lowering, node: ir.Node) -> None:
    """Cosines and sines of every position that a cache has room for: a table that is made here is
    more exact than what a GPU makes of a large angle."""
    frequencies = lowering.values(node.inputs[1]).astype(np.float32)
    scale = node.attributes["scale"].as_float()
    angles = np.arange(lowering.limits.capacity, dtype=np.float32)[:, None] * frequencies
    cos, sin = (
        lowering.constant(lowering.to_activations(part(angles.astype(np.float64)) * scale, "RoPE"))
        for part in (np.cos, np.sin)
    )
    lowering.ropes[node.outputs[0]] = (cos, sin)


def unable_rope_table(lowering: Lowering, node: ir.Node) -> None:
    """Padding would count as a sequence's length."""
    raise lowering.refusal(
        node, "frequencies that follow from a sequence's length", "choose target cpu"
    )


def rope_kv_write(lowering: Lowering, node: ir.Node) -> None:
    q, k, v = (lowering.tensor(value) for value in node.inputs[:3])
    table, q_norm, k_norm = node.inputs[3:6]
    if optional_input(node, 9) is not None or optional_input(node, 10) is not None:
        raise lowering.refusal(node, "channel scales of the KV cache", "choose a plain KV cache")
    eps = node.attributes["eps"].as_float()
    q = q if q_norm is None else normalised(lowering, q, q_norm, eps)
    k = k if k_norm is None else normalised(lowering, k, k_norm, eps)
    q, k, v = (_by_head(lowering, x) for x in (q, k, v))
    if table is not None:
        q, k = (_turned(lowering, x, table) for x in (q, k))
    layer = node.attributes["layer"].as_int()
    lowering.tensors[node.outputs[0]] = q
    for kind, update in (("k", k), ("v", v)):
        lowering.caches[layer, kind] = _updated(lowering, cache_name(layer, kind), update)


def paged_attention(lowering: Lowering, node: ir.Node) -> None:
    """Scores have no scale in TensorRT's layer, so queries are scaled before."""
    _check_attention(lowering, node)
    trt, config = lowering.trt, lowering.config
    q, layer = lowering.tensor(node.inputs[0]), node.attributes["layer"].as_int()
    scaled = lowering.binary("PROD", q, lowering.number(node.attributes["scale"].as_float(), q))
    attention = lowering.layer(
        "attention_v2",
        *(scaled, lowering.caches[layer, "k"], lowering.caches[layer, "v"]),
        *(trt.AttentionNormalizationOp.SOFTMAX, trt.CausalMaskKind.LOWER_RIGHT),
    )
    attention.key_value_lengths = lowering.inputs[KV_LENGTHS]
    attention.decomposable = True  # which it only is where no fused kernel has the shape
    by_token = lowering.transpose(attention.get_output(0), 0, 2, 1, 3)
    lowering.tensors[node.outputs[0]] = lowering.reshape(by_token, -1, config.q_size)


def _check_attention(lowering: Lowering, node: ir.Node) -> None:
    window = node.attributes["window"].as_int()
    if 0 < window < lowering.limits.capacity:
        remedy = f"choose max_sequence_length {window} or less, or target cpu"
        raise lowering.refusal(node, f"a window of {window} tokens", remedy)
    if node.attributes["soft_cap"].as_float():
        raise lowering.refusal(node, "a soft cap", "choose target cpu")
    if optional_input(node, 6) is not None:
        raise lowering.refusal(node, "attention sinks", "choose target cpu")


def _by_head(lowering: Lowering, x: Tensor) -> Tensor:
    """[T, heads * head_dim] as [B, heads, L, head_dim]."""
    size = lowering.config.head_dim
    by_token = lowering.by_token(x, x.shape[1] // size, size)
    return lowering.transpose(by_token, 0, 2, 1, 3)


def _turned(lowering: Lowering, x: Tensor, table: ir.Value) -> Tensor:
    cos, sin = lowering.ropes[table]
    layer = lowering.layer("rotary_embedding", x, cos, sin, False, 2 * cos.shape[1])
    layer.set_input(3, lowering.inputs[POSITIONS])
    return layer.get_output(0)


def _updated(lowering: Lowering, name: str, update: Tensor) -> Tensor:
    linear, where = lowering.trt.KVCacheMode.LINEAR, lowering.inputs[WRITE_INDICES]
    return lowering.add("kv_cache_update", lowering.inputs[name], update, where, linear)
