"""paged_attention: causal grouped-query attention over a paged KV cache, any mix of sequences.

Paged KV: Kwon et al., "Efficient Memory Management for LLM Serving with PagedAttention", 2023.
"""

import torch

from llmbuild.plugins.common.kv_pools import layer_pools


@torch.library.custom_op("llmbuild::paged_attention", mutates_args=())
def paged_attention(
    q: torch.Tensor,
    written: torch.Tensor,
    positions: torch.Tensor,
    query_start: torch.Tensor,
    kv_lengths: torch.Tensor,
    block_tables: torch.Tensor,
    sinks: torch.Tensor | None,
    layer: int,
    scale: float,
    window: int,
    soft_cap: float,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention of each token over its sequence's keys up to its own position.

    q: fp32 [T, H * D]. written: kv_write's token. positions [T], query_start [S+1],
    kv_lengths [S], block_tables [S, B]: the step graph's inputs. window: how many tokens back,
    the own one included, 0 for all. soft_cap: scores become soft_cap * tanh(score / soft_cap), 0
    for none. sinks: fp32 [H], a logit per head that joins the softmax with no value, or None.
    k_scale, v_scale: fp32 [Hkv * D] that kv_write divided K and V by, or None: queries are
    multiplied by the first, and the result by the second.
    Returns fp32 [T, H * D].
    """
    pools = layer_pools(layer)
    _, num_kv_heads, block_size, head_dim = pools.k.shape
    out = torch.empty_like(q)
    k_factors, v_factors = (
        torch.ones(()) if factors is None else factors.view(num_kv_heads, 1, 1, head_dim)
        for factors in (k_scale, v_scale)
    )
    for sequence, length in enumerate(kv_lengths.tolist()):
        rows = slice(int(query_start[sequence]), int(query_start[sequence + 1]))
        blocks = block_tables[sequence, : -(-length // block_size)].long()
        keys, values = (
            pool[blocks].float().transpose(1, 2).flatten(0, 1)[:length].transpose(0, 1)
            for pool in (pools.k, pools.v)
        )  # [Hkv, length, D]
        queries = q[rows].unflatten(-1, (num_kv_heads, -1, head_dim)).permute(1, 2, 0, 3)
        queries = scale * queries * k_factors
        scores = queries @ keys[:, None].transpose(-1, -2)  # [Hkv, G, tokens, length]
        if soft_cap:
            scores = soft_cap * torch.tanh(scores / soft_cap)
        back = positions[rows, None] - torch.arange(length)
        hidden = (back < 0) | (back >= window) if window else back < 0
        scores = scores.masked_fill(hidden, float("-inf"))
        if sinks is not None:
            sink = sinks.view(num_kv_heads, -1, 1, 1).expand(*scores.shape[:-1], 1)
            scores = torch.cat((scores, sink), dim=-1)
        weights = scores.softmax(-1)[..., :length]
        out[rows] = (weights @ values[:, None] * v_factors).permute(2, 0, 1, 3).flatten(1)
    return out


@paged_attention.register_fake
def _(
    q: torch.Tensor,
    written: torch.Tensor,
    positions: torch.Tensor,
    query_start: torch.Tensor,
    kv_lengths: torch.Tensor,
    block_tables: torch.Tensor,
    sinks: torch.Tensor | None,
    layer: int,
    scale: float,
    window: int,
    soft_cap: float,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
) -> torch.Tensor:
    return torch.empty_like(q)
