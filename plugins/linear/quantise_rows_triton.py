"""Activations rounded on GPUs for a linear that reads codes, where no kernel before it did that."""

import triton
import triton.language as tl

from llmbuild.plugins.common.kv_triton import encode_e4m3
from llmbuild.plugins.common.row_groups_triton import (
    group_columns,
    load_columns,
    store_int8_groups,
)


@triton.jit
def quantise_rows(
    x,  # [T, N]
    static_scales,  # fp32 [N / GROUP] or None
    N,
    codes,  # int8 [T, N]
    scales,  # fp32 [T, N / GROUP]
    GROUP: tl.constexpr,  # columns that share a scale
    GROUPS: tl.constexpr,  # of a program
):
    """Grid: (T, ceil(N / GROUP / GROUPS))."""
    row = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * GROUPS
    groups, columns, exists = group_columns(first, N, GROUP, GROUPS)
    values = load_columns(x + row * N, columns, exists)
    store_int8_groups(values, static_scales, codes, scales, row, N, groups, columns, exists, GROUP)


@triton.jit
def quantise_rows_e4m3(
    x,  # [T, N]
    codes,  # e4m3 as bytes, uint8 [T, N]
    scales,  # fp32 [T]: the largest magnitude / 448, NaN where a row holds a NaN or an infinity
    N: tl.constexpr,
):
    """Grid: (T,)."""
    row = tl.program_id(0).to(tl.int64)
    group, columns, exists = group_columns(0, N, N, 1)
    values = load_columns(x + row * N, columns, exists)
    wrong = tl.sum(values * 0.0, axis=1, keep_dims=True)  # 0, or NaN
    largest = tl.max(tl.abs(values), axis=1, keep_dims=True) + wrong
    inverse = tl.div_rn(448.0, largest)
    steps = tl.where(inverse < float("inf"), values * inverse, 0.0)
    tl.store(codes + row * N + columns, encode_e4m3(steps), exists)
    tl.store(scales + row + group[:, None], tl.div_rn(largest, 448.0))
