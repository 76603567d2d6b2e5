"""Rows as groups of columns, and their rounding to int8: what kernels of activations share.

A group's columns are padded to a power of two. An int8 row is codes [N] and fp32 scales
[N / GROUP]; a value is code * scale, rounded as docs/step-graph.md says, but that a compiler may
fuse a product into the sum after it.
"""

import triton
import triton.language as tl

from llmbuild.plugins.common.kv_triton import nearest_integer, scaled_codes


@triton.jit
def group_columns(first, N, GROUP: tl.constexpr, GROUPS: tl.constexpr):
    """GROUPS groups of a row from group `first` on: their numbers [GROUPS], their columns [GROUPS,
    padded], and which of those exist."""
    groups = first + tl.arange(0, GROUPS)
    column = tl.arange(0, triton.next_power_of_2(GROUP))[None, :]
    columns = groups[:, None] * GROUP + column
    return groups, columns, (columns < N) & (column < GROUP)


@triton.jit
def load_columns(x, columns, exists):
    """Columns of the row at x as fp32, 0 where there are none."""
    return tl.load(x + columns, exists, other=0.0).to(tl.float32)


@triton.jit
def store_int8_groups(
    values, static_scales, codes, scales, row, N, groups, columns, exists, GROUP: tl.constexpr
):
    """Round groups of a row, fp32 [groups, columns], to codes [T, N] and scales [T, N / GROUP].

    static_scales: fp32 [N / GROUP], or None for scales by the largest values. What no code can tell
    makes its group's scale NaN: a NaN, and without static scales an infinity.
    """
    group_exists = groups < N // GROUP
    if static_scales is None:
        rounded, scale = scaled_codes(values)
    else:
        scale = tl.load(static_scales + groups, group_exists, other=1.0)
        steps = values * tl.div_rn(tl.full(scale.shape, 1.0, tl.float32), scale)[:, None]
        is_nan = values != values
        steps = tl.where(is_nan, 0.0, tl.clamp(steps, -127.0, 127.0))
        rounded = nearest_integer(steps).to(tl.int8)
        scale = tl.where(tl.max(is_nan.to(tl.int32), axis=1) > 0, float("nan"), scale)
    tl.store(codes + row * N + columns, rounded, exists)
    tl.store(scales + row * (N // GROUP) + groups, scale, group_exists)
