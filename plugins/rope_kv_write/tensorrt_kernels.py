"""rope_kv_write with the arguments of a TensorRT plugin."""

import triton
import triton.language as tl

from llmbuild.plugins.common.tensorrt_kernels import at_address
from llmbuild.plugins.rope_kv_write.triton import rope_kv_write


@triton.jit
def rope_kv_write_by_address(
    q,
    k,
    v,
    table,
    q_norm,
    k_norm,
    positions,
    query_start,
    block_tables,
    k_channel_scale,
    v_channel_scale,
    k_items,  # int64 [1], as all of the pools' tensors: an address, or None
    k_scales,
    k_minima,
    v_items,
    v_scales,
    v_minima,
    sequences,
    table_blocks,
    q_out,
    token,  # int32 [1]: whoever reads it runs after the write
    K_ITEMS_TYPE: tl.constexpr,
    K_SCALES_TYPE: tl.constexpr,
    K_MINIMA_TYPE: tl.constexpr,
    V_ITEMS_TYPE: tl.constexpr,
    V_SCALES_TYPE: tl.constexpr,
    V_MINIMA_TYPE: tl.constexpr,
    EPS: tl.constexpr,
    ROTARY_DIM: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    PADDED: tl.constexpr,
    TOKENS: tl.constexpr,
):
    """Grid: that of rope_kv_write."""
    if tl.program_id(0) + tl.program_id(1) == 0:
        tl.store(token, 0)
    rope_kv_write(
        q,
        k,
        v,
        table,
        q_norm,
        k_norm,
        positions,
        query_start,
        block_tables,
        k_channel_scale,
        v_channel_scale,
        at_address(k_items, K_ITEMS_TYPE),
        at_address(k_scales, K_SCALES_TYPE),
        at_address(k_minima, K_MINIMA_TYPE),
        at_address(v_items, V_ITEMS_TYPE),
        at_address(v_scales, V_SCALES_TYPE),
        at_address(v_minima, V_MINIMA_TYPE),
        q_out,
        sequences,
        table_blocks,
        EPS,
        ROTARY_DIM,
        NUM_HEADS,
        NUM_KV_HEADS,
        HEAD_DIM,
        BLOCK_SIZE,
        PADDED,
        TOKENS,
    )
