"""TensorRT's layers of attention over linear caches: what each asks for, and what it computes."""

from typing import Any

import torch

from llmbuild.builder.targets.tensorrt.emulation.module import DataType
from llmbuild.builder.targets.tensorrt.emulation.tensors import Layer, Made, MakeLayer, Tensor
from llmbuild.errors import InternalError

_FUSED_HEAD_DIMS = range(32, 257)


def _rotary_embedding(
    layer: Layer, x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, width: int
) -> Made:
    """x: [B, heads, L, head_dim]; cos, sin: [positions, width / 2]."""
    positions = layer.inputs[3]
    layer.require_same_dtype(x, cos, sin)
    layer.require(positions.dtype is DataType.int32, f"positions in {positions.dtype.value}")
    layer.require(positions.sizes == (x.sizes[0], x.sizes[2]), "positions don't fit x")
    layer.require(cos.sizes == sin.sizes, "cosines don't fit sines")
    layer.require((cos.sizes[1], interleaved) == (width // 2, False), "interleaved isn't emulated")

    def compute(
        x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, positions: torch.Tensor
    ) -> torch.Tensor:
        c, s = (table[positions.long()][:, None].float() for table in (cos, sin))
        half = width // 2
        low, high, rest = x.float().split((half, half, x.shape[-1] - width), dim=-1)
        return torch.cat((low * c - high * s, high * c + low * s, rest), dim=-1)

    return Made([Tensor(x.dtype, x.sizes)], compute)


def _kv_cache_update(layer: Layer, cache: Tensor, update: Tensor, where: Tensor, mode: str) -> Made:
    """The cache [B, heads, capacity, head_dim] with the rows' tokens from `where` [B] on."""
    layer.require(cache.is_input, "the cache isn't an input")
    layer.require(mode == "LINEAR", f"mode {mode}")
    layer.require_same_dtype(cache, update)
    layer.require(where.dtype is DataType.int32, f"places in {where.dtype.value}")
    for axis in (0, 1, 3):
        layer.common(cache.sizes[axis], update.sizes[axis])

    def compute(cache: torch.Tensor, update: torch.Tensor, where: torch.Tensor) -> torch.Tensor:
        updated, length = cache.clone(), update.shape[2]
        for row, begin in enumerate(where.tolist()):
            if begin + length > cache.shape[2]:
                raise InternalError(f"{layer.name}: row {row} has no room from {begin} on")
            updated[row, :, begin : begin + length] = update[row]
        return updated

    return Made([Tensor(cache.dtype, cache.sizes)], compute)


def _attention_v2(layer: Any, q: Tensor, k: Tensor, v: Tensor, norm: str, causal: str) -> Made:
    """Of the last rows of each sequence's keys, scores not scaled."""
    layer.require((norm, causal) == ("SOFTMAX", "LOWER_RIGHT"), f"{norm}, {causal}")
    layer.require_same_dtype(q, k, v)
    layer.require(k.sizes == v.sizes, "keys don't fit values")
    layer.common(q.sizes[0], k.sizes[0])
    (heads, size), kv_heads = (q.shape[1], q.shape[3]), k.shape[1]
    layer.require(k.shape[3] == size and heads % kv_heads == 0, "queries don't fit keys")
    layer.require(layer.decomposable or size in _FUSED_HEAD_DIMS, f"heads of {size} don't fuse")
    lengths: Tensor = layer.key_value_lengths
    layer.require(lengths.dtype is DataType.int32, f"lengths in {lengths.dtype.value}")
    layer.require(lengths.sizes == q.sizes[:1], "lengths don't fit queries")
    layer.set_input(3, lengths)
    return Made([Tensor(q.dtype, q.sizes)], _attention)


def _attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lengths: torch.Tensor
) -> torch.Tensor:
    longest, length, kv_heads = int(lengths.max()), q.shape[2], k.shape[1]
    k, v = (x[:, :, :longest].float() for x in (k, v))
    grouped = q.float().unflatten(1, (kv_heads, -1))  # [B, KV heads, group, L, head_dim]
    scores = grouped @ k[:, :, None].mT
    own = torch.arange(length)[None] + (lengths - length)[:, None]  # [B, L]
    hidden = torch.arange(longest) > own[..., None]
    weights = scores.masked_fill(hidden[:, None, None], -torch.inf).softmax(-1)
    return (weights @ v[:, :, None]).flatten(1, 2)


ATTENTION_LAYERS: dict[str, MakeLayer] = {
    "rotary_embedding": _rotary_embedding,
    "kv_cache_update": _kv_cache_update,
    "attention_v2": _attention_v2,
}
