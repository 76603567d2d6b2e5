"""rotary, kv_write, and the fusion of both with QK-norm before them.

Rotary embedding: Su et al., "RoFormer", 2021, in the halves layout: element i of a head turns
with element i + R/2 of the R that turn.
"""

import torch

from llmbuild.plugins.common.kv_pools import kept, layer_pools
from llmbuild.plugins.rms_norm.op import rms_norm


@torch.library.custom_op("llmbuild::rotary", mutates_args=())
def rotary(x: torch.Tensor, table: torch.Tensor, head_dim: int) -> torch.Tensor:
    """Turn the first R elements of every head by its token's angles.

    x: fp32 [T, heads * head_dim]. table: fp32 [T, R], R even and at most head_dim.
    """
    cos, sin = table[:, None, :].chunk(2, dim=-1)
    heads = x.unflatten(-1, (-1, head_dim))
    turning, rest = heads.split((table.shape[-1], head_dim - table.shape[-1]), dim=-1)
    low, high = turning.chunk(2, dim=-1)
    turned = (low * cos - high * sin, high * cos + low * sin)
    return torch.cat((*turned, rest), dim=-1).flatten(-2)


@rotary.register_fake
def _(x: torch.Tensor, table: torch.Tensor, head_dim: int) -> torch.Tensor:
    return torch.empty_like(x)


@torch.library.custom_op("llmbuild::kv_write", mutates_args=())
def kv_write(
    k: torch.Tensor,
    v: torch.Tensor,
    positions: torch.Tensor,
    query_start: torch.Tensor,
    block_tables: torch.Tensor,
    layer: int,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
) -> torch.Tensor:
    """Write each token's K and V, fp32 [T, Hkv * D], to its slot of the layer's pools, rounded to
    what the dtype of each head keeps.

    k_scale, v_scale: fp32 [Hkv * D] that K and V are divided by first, or None. positions [T],
    query_start [S+1], block_tables [S, B]: the step graph's inputs. Returns an int32 [1] that
    stands for the pools' new state: attention takes it, so it runs afterwards.
    """
    pools = layer_pools(layer)
    _, num_kv_heads, block_size, head_dim = pools.k.shape
    sequence = torch.repeat_interleave(query_start.diff().long())
    block = block_tables[sequence, positions.long() // block_size].long()
    offset = positions.long() % block_size
    for pool, dtypes, values, scale in (
        (pools.k, pools.k_dtypes, k, k_scale),
        (pools.v, pools.v_dtypes, v, v_scale),
    ):
        divided = values if scale is None else values / scale
        heads = kept(divided.unflatten(-1, (num_kv_heads, head_dim)), dtypes)
        pool[block, :, offset] = heads.to(pool.dtype)
    return torch.zeros(1, dtype=torch.int32)


@kv_write.register_fake
def _(
    k: torch.Tensor,
    v: torch.Tensor,
    positions: torch.Tensor,
    query_start: torch.Tensor,
    block_tables: torch.Tensor,
    layer: int,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
) -> torch.Tensor:
    return positions.new_empty(1)


@torch.library.custom_op("llmbuild::rope_kv_write", mutates_args=())
def rope_kv_write(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    table: torch.Tensor | None,
    q_norm: torch.Tensor | None,
    k_norm: torch.Tensor | None,
    positions: torch.Tensor,
    query_start: torch.Tensor,
    block_tables: torch.Tensor,
    layer: int,
    eps: float,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """QK-norm (where weights are given), rotary (where a table is), and kv_write of K and V.

    Returns the turned Q, fp32 [T, H * D], and kv_write's token.
    """
    head_dim = layer_pools(layer).k.shape[-1]
    if q_norm is not None:
        q = rms_norm(q, q_norm, eps)
    if k_norm is not None:
        k = rms_norm(k, k_norm, eps)
    if table is not None:
        q, k = rotary(q, table, head_dim), rotary(k, table, head_dim)
    written = kv_write(k, v, positions, query_start, block_tables, layer, k_scale, v_scale)
    return q.clone(), written


@rope_kv_write.register_fake
def _(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    table: torch.Tensor | None,
    q_norm: torch.Tensor | None,
    k_norm: torch.Tensor | None,
    positions: torch.Tensor,
    query_start: torch.Tensor,
    block_tables: torch.Tensor,
    layer: int,
    eps: float,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty_like(q), positions.new_empty(1)
