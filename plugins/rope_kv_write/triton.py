"""rope_kv_write on GPUs: QK-norm, rotary, and the write of K and V."""

from collections.abc import Iterator

import triton
import triton.language as tl

from llmbuild.plugins.common.attention_variant import (
    AttentionShape,
    pool_type,
    worth_building,
)
from llmbuild.plugins.common.kernel_variant import KernelVariant
from llmbuild.plugins.common.kv_triton import narrowed, slot_rows, store_rows
from llmbuild.plugins.common.make_variant import make_variant
from llmbuild.plugins.common.tuning import tuned


@triton.jit
def rope_kv_write(
    q,  # [T, H * D]
    k,  # [T, Hkv * D]
    v,
    table,  # fp32 [T, R] or None
    q_norm,  # fp32 [D] or None
    k_norm,
    positions,  # int32 [T]
    query_start,  # int32 [S + 1]; tokens after the last entry are padding
    block_tables,  # int32 [S, B]
    k_channel_scale,  # fp32 [Hkv * D] or None
    v_channel_scale,
    k_items,
    k_scales,
    k_minima,
    v_items,
    v_scales,
    v_minima,
    q_out,  # as q; rows of padding stay as they are
    sequences,  # S
    table_blocks,  # B
    EPS: tl.constexpr,
    ROTARY_DIM: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    PADDED: tl.constexpr,  # HEAD_DIM, rounded up to a power of two
    TOKENS: tl.constexpr,
):
    """Grid: (ceil(T / TOKENS), H + Hkv), heads of Q first."""
    tokens = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    exists = tokens < tl.load(query_start + sequences)
    head = tl.program_id(1)
    if head < NUM_HEADS:
        x = turned_rows(
            q, q_norm, table, tokens, exists, head, NUM_HEADS, EPS, ROTARY_DIM, HEAD_DIM, PADDED
        )
        column = tl.arange(0, PADDED)
        places = q_out + (tokens * NUM_HEADS + head)[:, None] * HEAD_DIM + column[None, :]
        inside = exists[:, None] & (column < HEAD_DIM)[None, :]
        tl.store(places, narrowed(x, q_out.dtype.element_ty), inside)
    else:
        head -= NUM_HEADS
        sequence = sequence_of(query_start, sequences, tokens, TOKENS)
        at = tl.load(positions + tokens, exists, other=0)
        rows = slot_rows(
            block_tables + sequence * table_blocks, at, exists, head, NUM_KV_HEADS, BLOCK_SIZE
        )
        x = turned_rows(
            k, k_norm, table, tokens, exists, head, NUM_KV_HEADS, EPS, ROTARY_DIM, HEAD_DIM, PADDED
        )
        x = divided(x, k_channel_scale, head, HEAD_DIM, PADDED)
        store_rows(k_items, k_scales, k_minima, rows, x, exists, HEAD_DIM, PADDED)
        x = head_rows(v, tokens, exists, head, NUM_KV_HEADS, HEAD_DIM, tl.arange(0, PADDED))
        x = divided(x, v_channel_scale, head, HEAD_DIM, PADDED)
        store_rows(v_items, v_scales, v_minima, rows, x, exists, HEAD_DIM, PADDED)


@triton.jit
def turned_rows(
    x,
    norm,
    table,
    tokens,
    exists,
    head,
    NUM_HEADS: tl.constexpr,
    EPS: tl.constexpr,
    ROTARY_DIM: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED: tl.constexpr,
):
    """A head's rows, normalised and turned, fp32 [TOKENS, PADDED]. Of the elements that turn, i and
    i + R / 2 are partners."""
    column = tl.arange(0, PADDED)
    rows = head_rows(x, tokens, exists, head, NUM_HEADS, HEAD_DIM, column)
    factor = tl.full((tokens.shape[0],), 1.0, tl.float32)
    if norm is not None:
        factor = tl.rsqrt(tl.sum(rows * rows, axis=1) / HEAD_DIM + EPS)
        rows = normalised(rows, factor, norm, column, HEAD_DIM)
    if table is not None:
        HALF: tl.constexpr = ROTARY_DIM // 2
        partner = tl.where(column < HALF, column + HALF, column - HALF)
        turns = column < ROTARY_DIM
        partner = tl.where(turns, partner, column)
        partners = head_rows(x, tokens, exists, head, NUM_HEADS, HEAD_DIM, partner)
        if norm is not None:
            partners = normalised(partners, factor, norm, partner, HEAD_DIM)
        angle = table + tokens[:, None] * ROTARY_DIM + (column % HALF)[None, :]
        inside = exists[:, None] & turns[None, :]
        cosine = tl.load(angle, inside, other=1.0)
        sine = tl.load(angle + HALF, inside, other=0.0)
        rows = rows * cosine + partners * tl.where((column < HALF)[None, :], -sine, sine)
    return rows


@triton.jit
def head_rows(x, tokens, exists, head, NUM_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, column):
    """A head's elements of some columns as fp32, 0 where there are none."""
    places = x + (tokens * NUM_HEADS + head)[:, None] * HEAD_DIM + column[None, :]
    inside = exists[:, None] & (column < HEAD_DIM)[None, :]
    return tl.load(places, inside, other=0.0).to(tl.float32)


@triton.jit
def normalised(rows, factor, norm, column, HEAD_DIM: tl.constexpr):
    weight = tl.load(norm + column, column < HEAD_DIM, other=0.0)
    return rows * factor[:, None] * weight[None, :]


@triton.jit
def divided(rows, channel_scale, head, HEAD_DIM: tl.constexpr, PADDED: tl.constexpr):
    """Rows over the head's channel scales, where there are such."""
    if channel_scale is not None:
        column = tl.arange(0, PADDED)
        scale = tl.load(channel_scale + head * HEAD_DIM + column, column < HEAD_DIM, other=1.0)
        rows = tl.div_rn(rows, tl.broadcast_to(scale[None, :], rows.shape))
    return rows


@triton.jit
def sequence_of(query_start, sequences, tokens, TOKENS: tl.constexpr):
    """Each token's sequence: the last of those that begin at or before it."""
    found = tl.zeros((TOKENS,), tl.int32)
    for first in range(1, sequences, 32):
        sequence = first + tl.arange(0, 32)
        starts = tl.load(query_start + sequence, sequence < sequences, other=2147483647)
        found += tl.sum((starts[None, :] <= tokens[:, None]).to(tl.int32), axis=1)
    return found


def variant(
    shape: AttentionShape,
    activation: str,
    kv_dtypes: tuple[str, str],
    sm: int,
    *,
    rotary_dim: int | None = None,
    eps: float | None = None,
    has_channel_scales: bool = False,
) -> KernelVariant:
    """rotary_dim: elements of a head that turn, None for none. eps: of QK-norm, None without."""
    tiles = tuned("rope_kv_write", sm)
    k, v = (pool_type(dtype, sm) for dtype in kv_dtypes)
    norm, channel_scale = "*fp32" if eps else None, "*fp32" if has_channel_scales else None
    types = {
        **dict.fromkeys(("q", "k", "v", "q_out"), f"*{activation}"),
        **dict.fromkeys(("q_norm", "k_norm"), norm),
        **dict.fromkeys(("k_channel_scale", "v_channel_scale"), channel_scale),
        **dict.fromkeys(("positions", "query_start", "block_tables"), "*i32"),
        **dict.fromkeys(("sequences", "table_blocks"), "i32"),
        "table": "*fp32" if rotary_dim else None,
        **k.arguments("k"),
        **v.arguments("v"),
    }
    constants = {
        **shape.constants,
        "EPS": eps or 0.0,
        "ROTARY_DIM": rotary_dim or 0,
        "NUM_HEADS": shape.num_heads,
        "TOKENS": tiles.rows,
    }
    read_and_written = 2 * (2 * shape.num_heads + 2 * shape.num_kv_heads) * shape.head_dim
    pool_bytes = shape.num_kv_heads * (k.row_bytes(shape.head_dim) + v.row_bytes(shape.head_dim))
    return make_variant(
        shape.name("rope_kv_write", activation, *kv_dtypes),
        rope_kv_write,
        types,
        constants,
        tiles,
        read_and_written + pool_bytes,
    )


def variants(sm: int) -> Iterator[KernelVariant]:
    for shape, activation, kv_dtypes in worth_building():
        yield variant(
            shape,
            activation,
            kv_dtypes,
            sm,
            rotary_dim=shape.head_dim,
            has_channel_scales="int8-static" in kv_dtypes,
        )
