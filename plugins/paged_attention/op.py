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
    layer: int,
    scale: float,
    window: int,
) -> torch.Tensor:
    """Attention of each token over its sequence's keys up to its own position.

    q: fp32 [T, H * D]. written: kv_write's token. positions [T], query_start [S+1],
    kv_lengths [S], block_tables [S, B]: the step graph's inputs. window: how many tokens back,
    the own one included, 0 for all. Returns fp32 [T, H * D].
    """
    pools = layer_pools(layer)
    _, num_kv_heads, block_size, head_dim = pools.k.shape
    out = torch.empty_like(q)
    for sequence, length in enumerate(kv_lengths.tolist()):
        rows = slice(int(query_start[sequence]), int(query_start[sequence + 1]))
        blocks = block_tables[sequence, : -(-length // block_size)].long()
        keys, values = (
            pool[blocks].float().transpose(1, 2).flatten(0, 1)[:length].transpose(0, 1)
            for pool in (pools.k, pools.v)
        )  # [Hkv, length, D]
        queries = q[rows].unflatten(-1, (num_kv_heads, -1, head_dim)).permute(1, 2, 0, 3)
        scores = scale * queries @ keys[:, None].transpose(-1, -2)  # [Hkv, G, tokens, length]
        back = positions[rows, None] - torch.arange(length)
        hidden = (back < 0) | (back >= window) if window else back < 0
        weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
        out[rows] = (weights @ values[:, None]).permute(2, 0, 1, 3).flatten(1)
    return out


@paged_attention.register_fake
def _(
    q: torch.Tensor,
    written: torch.Tensor,
    positions: torch.Tensor,
    query_start: torch.Tensor,
    kv_lengths: torch.Tensor,
    block_tables: torch.Tensor,
    layer: int,
    scale: float,
    window: int,
) -> torch.Tensor:
    return torch.empty_like(q)
