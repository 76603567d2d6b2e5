"""paged_attention with the arguments of TensorRT plugins, of any mix of sequences: those with one
token in splits of the context, as `decode` does it, and the others as `prefill` does."""

import triton
import triton.language as tl

from llmbuild.plugins.common.kv_triton import narrowed
from llmbuild.plugins.common.tensorrt_kernels import at_address
from llmbuild.plugins.paged_attention.attend_triton import LOG2_E
from llmbuild.plugins.paged_attention.triton import decode, prefill, sequence_of_tile


@triton.jit
def decode_by_address(
    q,
    token,  # rope_kv_write's, read by no one
    query_start,
    kv_lengths,
    block_tables,
    k_channel_scale,
    k_items,  # int64 [1], as all of the pools' tensors: an address, or None
    k_scales,
    k_minima,
    v_items,
    v_scales,
    v_minima,
    table_blocks,
    partial_out,  # fp32 [S, H, SPLITS, D]
    partial_stats,  # fp32 [S, H, SPLITS, 2]
    SPLITS: tl.constexpr,
    K_ITEMS_TYPE: tl.constexpr,
    K_SCALES_TYPE: tl.constexpr,
    K_MINIMA_TYPE: tl.constexpr,
    V_ITEMS_TYPE: tl.constexpr,
    V_SCALES_TYPE: tl.constexpr,
    V_MINIMA_TYPE: tl.constexpr,
    SCALE: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    GROUP: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    PADDED: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
):
    """Grid: (S, Hkv, SPLITS). Leaves out sequences with more tokens than one."""
    sequence = tl.program_id(0)
    if tl.load(query_start + sequence + 1) - tl.load(query_start + sequence) == 1:
        decode(
            q,
            query_start,
            kv_lengths,
            block_tables,
            k_channel_scale,
            at_address(k_items, K_ITEMS_TYPE),
            at_address(k_scales, K_SCALES_TYPE),
            at_address(k_minima, K_MINIMA_TYPE),
            at_address(v_items, V_ITEMS_TYPE),
            at_address(v_scales, V_SCALES_TYPE),
            at_address(v_minima, V_MINIMA_TYPE),
            partial_out,
            partial_stats,
            table_blocks,
            SPLITS,
            SCALE,
            WINDOW,
            SOFT_CAP,
            GROUP,
            NUM_KV_HEADS,
            HEAD_DIM,
            BLOCK_SIZE,
            PADDED,
            ROWS,
            KEYS,
        )


@triton.jit
def prefill_or_combine(
    q,
    query_start,
    kv_lengths,
    block_tables,
    sinks,
    k_channel_scale,
    v_channel_scale,
    k_items,  # int64 [1], as all of the pools' tensors: an address, or None
    k_scales,
    k_minima,
    v_items,
    v_scales,
    v_minima,
    partial_out,  # of decode_by_address
    partial_stats,
    sequences,
    table_blocks,
    out,
    SPLITS: tl.constexpr,
    K_ITEMS_TYPE: tl.constexpr,
    K_SCALES_TYPE: tl.constexpr,
    K_MINIMA_TYPE: tl.constexpr,
    V_ITEMS_TYPE: tl.constexpr,
    V_SCALES_TYPE: tl.constexpr,
    V_MINIMA_TYPE: tl.constexpr,
    SCALE: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    GROUP: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    PADDED: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
):
    """Grid: that of prefill, (T // (ROWS // GROUP) + S, Hkv), where a sequence with one token has
    one tile, too."""
    TOKENS: tl.constexpr = ROWS // GROUP
    tile, head = tl.program_id(0), tl.program_id(1)
    sequence = sequence_of_tile(query_start, sequences, tile, TOKENS)
    start = tl.load(query_start + sequence)
    if tl.load(query_start + sequence + 1) - start == 1:
        is_first = tile == start // TOKENS + sequence
        if is_first & (tl.load(kv_lengths + sequence) > 0):
            for member in range(GROUP):
                combine_splits(
                    sinks,
                    v_channel_scale,
                    partial_out,
                    partial_stats,
                    out,
                    sequence,
                    start,
                    head * GROUP + member,
                    SPLITS,
                    GROUP,
                    NUM_KV_HEADS,
                    HEAD_DIM,
                    PADDED,
                )
    else:
        prefill(
            q,
            query_start,
            kv_lengths,
            block_tables,
            sinks,
            k_channel_scale,
            v_channel_scale,
            at_address(k_items, K_ITEMS_TYPE),
            at_address(k_scales, K_SCALES_TYPE),
            at_address(k_minima, K_MINIMA_TYPE),
            at_address(v_items, V_ITEMS_TYPE),
            at_address(v_scales, V_SCALES_TYPE),
            at_address(v_minima, V_MINIMA_TYPE),
            out,
            sequences,
            table_blocks,
            SCALE,
            WINDOW,
            SOFT_CAP,
            GROUP,
            NUM_KV_HEADS,
            HEAD_DIM,
            BLOCK_SIZE,
            PADDED,
            ROWS,
            KEYS,
        )


@triton.jit
def combine_splits(
    sinks,
    v_channel_scale,
    partial_out,
    partial_stats,
    out,
    sequence,
    token,
    head,
    SPLITS: tl.constexpr,
    GROUP: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED: tl.constexpr,
):
    """A head's row of the result, of all splits in one; SPLITS is a power of two."""
    HEADS: tl.constexpr = NUM_KV_HEADS * GROUP
    parts = (sequence * HEADS + head) * SPLITS + tl.arange(0, SPLITS)
    maxima = tl.load(partial_stats + parts * 2)
    largest = tl.max(maxima, axis=0)
    total = 0.0
    if sinks is not None:
        sink = tl.load(sinks + head) * LOG2_E
        largest = tl.maximum(largest, sink)
        total = tl.exp2(sink - largest)
    weights = tl.exp2(maxima - largest)
    total += tl.sum(weights * tl.load(partial_stats + parts * 2 + 1), axis=0)
    column = tl.arange(0, PADDED)
    places = partial_out + parts[:, None] * HEAD_DIM + column[None, :]
    values = tl.load(places, (column < HEAD_DIM)[None, :], other=0.0)
    result = tl.sum(values * weights[:, None], axis=0) / total
    if v_channel_scale is not None:
        channel = head // GROUP * HEAD_DIM + column
        result *= tl.load(v_channel_scale + channel, column < HEAD_DIM, other=0.0)
    places = out + (token * HEADS + head) * HEAD_DIM + column
    tl.store(places, narrowed(result, out.dtype.element_ty), column < HEAD_DIM)
