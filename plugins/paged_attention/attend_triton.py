"""Softmax-weighted values of a range of keys, for a tile of queries of one KV head.

Online softmax in tiles: Dao et al., "FlashAttention", 2022. Scores are in units of log 2, so that
exp2 serves.
"""

import triton
import triton.language as tl

from llmbuild.plugins.common.kv_triton import load_codes, narrowed, slot_rows

# Below any score. Finite, so that rows without keys have the weight exp2(0) * 0 and not a NaN.
LOWEST = tl.constexpr(-1e30)
LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def load_queries(
    q, channel_scale, head_rows, exists, head, HEAD_DIM: tl.constexpr, PADDED: tl.constexpr
):
    """Rows of Q times K's channel scales, in q's type."""
    column = tl.arange(0, PADDED)
    inside = exists[:, None] & (column < HEAD_DIM)[None, :]
    queries = tl.load(q + head_rows[:, None] * HEAD_DIM + column[None, :], inside, other=0.0)
    if channel_scale is not None:
        factors = tl.load(channel_scale + head * HEAD_DIM + column, column < HEAD_DIM, other=0.0)
        scaled = queries.to(tl.float32) * factors[None, :]
        queries = narrowed(scaled, q.dtype.element_ty)
    return queries


@triton.jit
def attend(
    queries,  # [ROWS, PADDED]
    positions,  # [ROWS]
    begin,
    end,
    block_table,
    head,
    k_items,
    k_scales,
    k_minima,
    v_items,
    v_scales,
    v_minima,
    largest,  # [ROWS]: the score and the sum to start from
    total,
    SCALE: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    PADDED: tl.constexpr,
    KEYS: tl.constexpr,
):
    """Softmax-weighted values of the keys [begin, end), not yet divided by their total, with the
    largest score that the weights are relative to, and the total."""
    ROWS: tl.constexpr = queries.shape[0]
    out = tl.zeros((ROWS, PADDED), tl.float32)
    for start in range(begin, end, KEYS):
        keys = start + tl.arange(0, KEYS)
        exists = keys < end
        rows = slot_rows(block_table, keys, exists, head, NUM_KV_HEADS, BLOCK_SIZE)
        scores = SCALE * key_products(
            queries, k_items, k_scales, k_minima, rows, exists, HEAD_DIM, PADDED
        )
        if SOFT_CAP > 0.0:
            scores = SOFT_CAP * tanh(scores / SOFT_CAP)
        back = positions[:, None] - keys[None, :]
        seen = exists[None, :] & (back >= 0)
        if WINDOW > 0:
            seen &= back < WINDOW
        scores = tl.where(seen, scores * LOG2_E, -float("inf"))
        higher = tl.maximum(largest, tl.max(scores, axis=1))
        shrink = tl.exp2(largest - higher)
        weights = tl.exp2(scores - higher[:, None])
        total = total * shrink + tl.sum(weights, axis=1)
        out = out * shrink[:, None] + value_sums(
            weights, queries.dtype, v_items, v_scales, v_minima, rows, exists, HEAD_DIM, PADDED
        )
        largest = higher
    return out, largest, total


@triton.jit
def key_products(
    queries, items, scales, minima, rows, exists, HEAD_DIM: tl.constexpr, PADDED: tl.constexpr
):
    """Queries times keys, fp32 [ROWS, KEYS]: codes are multiplied, and scaled afterwards."""
    codes = load_codes(items, minima, rows, exists, HEAD_DIM, PADDED, queries.dtype)
    products = tl.dot(queries, tl.trans(codes))
    if scales is not None:
        products *= tl.load(scales + rows, exists, other=0.0).to(tl.float32)[None, :]
    if minima is not None:
        sums = tl.sum(queries.to(tl.float32), axis=1)
        minimum = tl.load(minima + rows, exists, other=0.0).to(tl.float32)
        products += sums[:, None] * minimum[None, :]
    return products


@triton.jit
def value_sums(
    weights,
    TYPE: tl.constexpr,
    items,
    scales,
    minima,
    rows,
    exists,
    HEAD_DIM: tl.constexpr,
    PADDED: tl.constexpr,
):
    """Weighted values, fp32 [ROWS, PADDED]. Weights of codes are made relative to the tile's
    largest scale, which leaves them within the range of TYPE."""
    codes = load_codes(items, minima, rows, exists, HEAD_DIM, PADDED, TYPE)
    if scales is not None:
        scale = tl.load(scales + rows, exists, other=0.0).to(tl.float32)
        unit = tl.maximum(tl.max(scale, axis=0), 1e-30)
        sums = unit * tl.dot((weights * (scale / unit)[None, :]).to(TYPE), codes)
    else:
        sums = tl.dot(weights.to(TYPE), codes)
    if minima is not None:
        minimum = tl.load(minima + rows, exists, other=0.0).to(tl.float32)
        sums += tl.sum(weights * minimum[None, :], axis=1)[:, None]
    return sums


@triton.jit
def tanh(x):
    """1 - 2 / (e^2x + 1)."""
    return 1.0 - 2.0 / (tl.exp2(x * (2.0 * LOG2_E)) + 1.0)
