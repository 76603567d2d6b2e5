"""rms_norm and add_rms_norm on GPUs, a row a program; also with the norm rounded to int8."""

from collections.abc import Iterator
from itertools import product

import triton
import triton.language as tl

from llmbuild.plugins.common.kernel_variant import KernelVariant
from llmbuild.plugins.common.kv_triton import narrowed
from llmbuild.plugins.common.make_variant import for_row_of, make_variant
from llmbuild.plugins.common.model_shape import LLAMA_8B, MODEL_SHAPES, SMOLLM2
from llmbuild.plugins.common.row_groups_triton import (
    group_columns,
    load_columns,
    store_int8_groups,
)
from llmbuild.plugins.common.tuning import tuned

# Widths, and how many columns of int8 activations share a scale: in our recipes for SmolLM2 32.
_INT8_NORMS = ((SMOLLM2.hidden, 32), (LLAMA_8B.hidden, 64))


@triton.jit
def rms_norm(
    x,  # [T, N]
    weight,  # fp32 [GROUP]
    y,  # as x
    N: tl.constexpr,
    GROUP: tl.constexpr,  # neighbours of a row that are normalised together
    EPS: tl.constexpr,
):
    """Grid: (T,)."""
    _, columns, exists = group_columns(0, N, GROUP, triton.next_power_of_2(N // GROUP))
    start = tl.program_id(0).to(tl.int64) * N
    values = load_columns(x + start, columns, exists)
    squares = tl.sum(values * values, axis=1, keep_dims=True)
    factor = tl.rsqrt(squares * (1.0 / GROUP) + EPS)
    values = values * factor * load_columns(weight, columns % GROUP, exists)
    tl.store(y + start + columns, narrowed(values, y.dtype.element_ty), exists)


@triton.jit
def add_rms_norm(
    x,  # [T, N]
    residual,  # as x
    weight,  # fp32 [N]
    total,  # x + residual, as x
    y,  # its norm, as x
    N: tl.constexpr,
    EPS: tl.constexpr,
):
    """Grid: (T,)."""
    _, columns, exists = group_columns(0, N, N, 1)
    start = tl.program_id(0).to(tl.int64) * N
    values = added(x + start, residual + start, total + start, columns, exists)
    values = normalised(values, weight, columns, exists, N, EPS)
    tl.store(y + start + columns, narrowed(values, y.dtype.element_ty), exists)


@triton.jit
def rms_norm_int8(
    x,  # [T, N]
    weight,  # fp32 [N]
    static_scales,  # fp32 [N / GROUP] or None
    codes,  # int8 [T, N]
    scales,  # fp32 [T, N / GROUP]
    N: tl.constexpr,
    GROUP: tl.constexpr,  # columns that share a scale
    EPS: tl.constexpr,
):
    """Grid: (T,)."""
    groups, columns, exists = group_columns(0, N, GROUP, triton.next_power_of_2(N // GROUP))
    row = tl.program_id(0).to(tl.int64)
    values = load_columns(x + row * N, columns, exists)
    values = normalised(values, weight, columns, exists, N, EPS)
    store_int8_groups(values, static_scales, codes, scales, row, N, groups, columns, exists, GROUP)


@triton.jit
def add_rms_norm_int8(
    x,  # [T, N]
    residual,  # as x
    weight,  # fp32 [N]
    static_scales,  # fp32 [N / GROUP] or None
    total,  # x + residual, as x
    codes,  # its norm, int8 [T, N]
    scales,  # fp32 [T, N / GROUP]
    N: tl.constexpr,
    GROUP: tl.constexpr,  # columns that share a scale
    EPS: tl.constexpr,
):
    """Grid: (T,)."""
    groups, columns, exists = group_columns(0, N, GROUP, triton.next_power_of_2(N // GROUP))
    row = tl.program_id(0).to(tl.int64)
    start = row * N
    values = added(x + start, residual + start, total + start, columns, exists)
    values = normalised(values, weight, columns, exists, N, EPS)
    store_int8_groups(values, static_scales, codes, scales, row, N, groups, columns, exists, GROUP)


@triton.jit
def added(x, residual, total, columns, exists):
    """The sum of two rows, which is also stored; the norm takes it before it is rounded."""
    values = load_columns(x, columns, exists) + load_columns(residual, columns, exists)
    tl.store(total + columns, narrowed(values, total.dtype.element_ty), exists)
    return values


@triton.jit
def normalised(values, weight, columns, exists, N: tl.constexpr, EPS: tl.constexpr):
    """RMSNorm of a whole row, however its columns lie."""
    squares = tl.sum(tl.sum(values * values, axis=1), axis=0)
    factor = tl.rsqrt(squares * (1.0 / N) + EPS)
    return values * factor * load_columns(weight, columns, exists)


def variants(sm: int) -> Iterator[KernelVariant]:
    for shape, activation in product(MODEL_SHAPES, ("fp16", "bf16")):
        for with_residual in (False, True):
            yield norm_variant(sm, activation, shape.hidden, with_residual)
    for (width, group), is_static, with_residual in product(
        _INT8_NORMS, (False, True), (False, True)
    ):
        yield int8_norm_variant(sm, "bf16", width, group, is_static, with_residual)
    yield norm_variant(sm, "bf16", 32 * 128, with_residual=False, group=128)


def norm_variant(
    sm: int,
    activation: str,
    width: int,
    with_residual: bool,
    group: int | None = None,
    eps: float = 1e-5,
) -> KernelVariant:
    """group: neighbours that are normalised together, such as a head; the whole row by default."""
    pointer = f"*{activation}"
    types: dict[str, str | None] = {"x": pointer, "weight": "*fp32", "y": pointer}
    constants: dict[str, int | float] = {"N": width, "EPS": eps}
    kernel, name = (add_rms_norm, "add_rms_norm") if with_residual else (rms_norm, "rms_norm")
    name = f"{name}.{activation}.n{width}"
    if with_residual:
        assert group is None
        types |= {"residual": pointer, "total": pointer}
    else:
        constants["GROUP"] = group or width
        name += "" if group is None else f".g{group}"
    bytes_per_token = (8 if with_residual else 4) * width
    tiles = for_row_of(width, tuned("rms_norm", sm))
    return make_variant(name, kernel, types, constants, tiles, bytes_per_token)


def int8_norm_variant(
    sm: int,
    activation: str,
    width: int,
    group: int,
    is_static: bool,
    with_residual: bool,
    eps: float = 1e-5,
) -> KernelVariant:
    """group: columns that share a scale."""
    pointer = f"*{activation}"
    types = {
        "x": pointer,
        "weight": "*fp32",
        "static_scales": "*fp32" if is_static else None,
        "codes": "*i8",
        "scales": "*fp32",
    }
    if with_residual:
        types |= {"residual": pointer, "total": pointer}
    kernel = add_rms_norm_int8 if with_residual else rms_norm_int8
    name = ("add_" if with_residual else "") + "rms_norm_int8"
    return make_variant(
        f"{name}.{activation}.n{width}.a{group}" + (".static" if is_static else ""),
        kernel,
        types,
        {"N": width, "GROUP": group, "EPS": eps},
        for_row_of(width, tuned("rms_norm", sm)),
        bytes_per_token=(7 if with_residual else 3) * width + 4 * (width // group),
    )
