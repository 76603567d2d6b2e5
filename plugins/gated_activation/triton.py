"""gated_activation on GPUs: act(gate) * up; also rounded to int8.

Gate and up come as two buffers, or as the halves of each row of one, as a linear of both leaves
them: then `up` is None.
"""

from collections.abc import Iterator
from itertools import product

import triton
import triton.language as tl

from llmbuild.plugins.common.kernel_variant import KernelVariant
from llmbuild.plugins.common.kv_triton import narrowed
from llmbuild.plugins.common.make_variant import for_row_of, make_variant
from llmbuild.plugins.common.row_groups_triton import (
    group_columns,
    load_columns,
    store_int8_groups,
)
from llmbuild.plugins.common.tuning import tuned
from llmbuild.plugins.gated_activation.op import ACTIVATIONS

# What a kernel's KIND says.
KINDS = {name: number for number, name in enumerate(ACTIVATIONS)}
_SILU = tl.constexpr(KINDS["silu"])
_GELU = tl.constexpr(KINDS["gelu"])
_GELU_TANH = tl.constexpr(KINDS["gelu_tanh"])
_RELU = tl.constexpr(KINDS["relu"])

_SQRT_HALF = tl.constexpr(0.5**0.5)
_SQRT_8_OVER_PI = tl.constexpr((8 / 3.141592653589793) ** 0.5)


@triton.jit
def activated(x, KIND: tl.constexpr):
    """The activation of fp32 numbers. KIND: of KINDS."""
    if KIND == _SILU:
        y = x / (1.0 + tl.exp(-x))
    elif KIND == _GELU:
        y = 0.5 * x * (1.0 + tl.erf(x * _SQRT_HALF))
    elif KIND == _GELU_TANH:
        # (1 + tanh(a)) / 2 is 1 / (1 + exp(-2a)).
        y = x / (1.0 + tl.exp((x + 0.044715 * x * x * x) * -_SQRT_8_OVER_PI))
    else:
        positive = tl.where(x < 0.0, 0.0, x)  # a NaN stays
        y = positive if KIND == _RELU else positive * positive
    return y


@triton.jit
def gated_activation(
    gate,  # [T, N], or gate and up [T, 2 N]
    up,  # as gate, or None
    N,
    y,  # [T, N]
    KIND: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Grid: (T, ceil(N / COLUMNS))."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    exists = columns < N
    values = gated_row(gate, up, N, row, columns, exists, KIND)
    tl.store(y + row * N + columns, narrowed(values, y.dtype.element_ty), exists)


@triton.jit
def gated_activation_int8(
    gate,  # [T, N], or gate and up [T, 2 N]
    up,  # as gate, or None
    static_scales,  # fp32 [N / GROUP] or None
    N,
    codes,  # int8 [T, N]
    scales,  # fp32 [T, N / GROUP]
    KIND: tl.constexpr,
    GROUP: tl.constexpr,  # columns that share a scale
    GROUPS: tl.constexpr,  # of a program
):
    """Grid: (T, ceil(N / GROUP / GROUPS))."""
    row = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * GROUPS
    groups, columns, exists = group_columns(first, N, GROUP, GROUPS)
    values = gated_row(gate, up, N, row, columns, exists, KIND)
    store_int8_groups(values, static_scales, codes, scales, row, N, groups, columns, exists, GROUP)


@triton.jit
def gated_row(gate, up, N, row, columns, exists, KIND: tl.constexpr):
    if up is None:
        halves = gate + row * 2 * N
        gates, ups = (
            load_columns(halves, columns, exists),
            load_columns(halves + N, columns, exists),
        )
    else:
        gates = load_columns(gate + row * N, columns, exists)
        ups = load_columns(up + row * N, columns, exists)
    return activated(gates, KIND) * ups


def variants(sm: int) -> Iterator[KernelVariant]:
    for activation, is_merged in product(("fp16", "bf16"), (True, False)):
        yield gated_variant(sm, activation, "silu", is_merged)
    for kind in KINDS:
        if kind != "silu":
            yield gated_variant(sm, "bf16", kind, is_merged=True)
    for group, is_static in ((32, False), (64, False), (64, True)):
        yield int8_gated_variant(sm, "bf16", "silu", group, is_static)


def gated_variant(sm: int, activation: str, kind: str, is_merged: bool) -> KernelVariant:
    """is_merged: gate and up lie in one buffer."""
    tiles = tuned("gated_activation", sm)
    pointer = f"*{activation}"
    return make_variant(
        f"gated_activation.{activation}.{kind}" + (".merged" if is_merged else ""),
        gated_activation,
        {"gate": pointer, "up": None if is_merged else pointer, "N": "i32", "y": pointer},
        {"KIND": KINDS[kind], "COLUMNS": tiles.columns},
        tiles,
        bytes_per_token="6 * N",
        multiples_of_16=("N",),
    )


def int8_gated_variant(
    sm: int, activation: str, kind: str, group: int, is_static: bool
) -> KernelVariant:
    """Of gate and up in one buffer. group: columns that share a scale."""
    tiles = tuned("gated_activation", sm)
    types = {
        "gate": f"*{activation}",
        "up": None,
        "static_scales": "*fp32" if is_static else None,
        "N": "i32",
        "codes": "*i8",
        "scales": "*fp32",
    }
    return make_variant(
        f"gated_activation_int8.{activation}.{kind}.a{group}" + (".static" if is_static else ""),
        gated_activation_int8,
        types,
        {
            "KIND": KINDS[kind],
            "GROUP": group,
            "GROUPS": max(1, tiles.columns // triton.next_power_of_2(group)),
        },
        for_row_of(group, tiles),
        bytes_per_token=f"5 * N + 4 * N / {group}",
        multiples_of_16=("N",),
    )
