"""quantised_linear on GPUs: which kernels it has, for which weights and activations.

Of weights as stored, in fp16 or bf16, TensorRT has linears of its own.
"""

from collections.abc import Iterator
from itertools import product
from math import gcd

import triton

from llmbuild.plugins.common.kernel_variant import KernelVariant
from llmbuild.plugins.common.make_variant import for_row_of, make_variant
from llmbuild.plugins.common.model_shape import LLAMA_8B
from llmbuild.plugins.common.tuning import tuned
from llmbuild.plugins.common.weight_format import (
    E4M3,
    INT4,
    INT4_128_ZEROS,
    INT8,
    Q4_0,
    Q4_1,
    Q8_0,
    WeightFormat,
)
from llmbuild.plugins.linear.gemm_triton import quantised_gemm
from llmbuild.plugins.linear.gemv_triton import quantised_gemv
from llmbuild.plugins.linear.quantise_rows_triton import quantise_rows, quantise_rows_e4m3

FIRST_E4M3_SM = 89  # with tensor cores for it

# Weights that meet activations of two bytes.
_WIDE_ACTIVATIONS = {
    "fp16": (INT4, INT8),
    "bf16": (INT4, INT8, Q4_0, Q4_1, Q8_0, INT4_128_ZEROS, E4M3),
}

# Weights that meet int8 activations, and how many columns of those share a scale (quant/plan.py).
_INT8_ACTIVATIONS = ((INT4, 64), (INT8, 64), (Q4_0, 32), (Q4_1, 32), (Q8_0, 32))


def variants(sm: int) -> Iterator[KernelVariant]:
    for activation, formats in _WIDE_ACTIVATIONS.items():
        for weights in formats:
            for tokens in (1, tuned(f"linear.gemv_{weights.bits}bit", sm).rows):
                yield gemv_variant(sm, weights, activation, tokens)
            for is_many in (False, True):
                yield gemm_variant(sm, weights, activation, activation, is_many=is_many)
    for (weights, group), is_many in product(_INT8_ACTIVATIONS, (False, True)):
        yield gemm_variant(sm, weights, "i8", "bf16", group, is_many)
    for group, is_static in ((32, False), (64, False), (64, True)):
        yield quantise_variant(sm, "bf16", group, is_static)
    if sm >= FIRST_E4M3_SM:
        for is_many in (False, True):
            yield gemm_variant(sm, E4M3, "fp8e4nv", "bf16", 0, is_many)
        for width in (LLAMA_8B.hidden, LLAMA_8B.inner):
            yield quantise_e4m3_variant(sm, "bf16", width)


def gemv_variant(
    sm: int, weights: WeightFormat, activation: str, tokens: int, has_bias: bool = False
) -> KernelVariant:
    """For up to `tokens` tokens, a power of two."""
    tiles = tuned(f"linear.gemv_{weights.bits}bit", sm)
    types = weights.types(sm)
    del types["codes"]  # here they are words
    types |= {
        "x": f"*{activation}",
        "words": "*i32",
        "bias": "*fp32" if has_bias else None,
        "tokens": "i32",
        "N": "i32",
        "W": "i32",
        "y": f"*{activation}",
    }
    constants = weights.constants | {
        "IS_E4M3": weights.numbers == "e4m3",
        "TOKENS": tokens,
        "FEATURES": tiles.columns,
        "DEPTH": tiles.depth,
    }
    return make_variant(
        f"quantised_gemv.{activation}.{weights.name}.t{tokens}" + (".bias" if has_bias else ""),
        quantised_gemv,
        types,
        constants,
        tiles,
        bytes_per_token=f"({weights.bytes_of('K')}) * N / T",
        multiples_of_16=("N",),
    )


def gemm_variant(
    sm: int,
    weights: WeightFormat,
    x: str,
    y: str,
    x_group: int = 0,
    is_many: bool = True,
    has_bias: bool = False,
    columns: int = 0,
) -> KernelVariant:
    """x, y: Triton's names of the types. x_group: columns of int8 or fp8e4nv activations that share
    a scale, 0 for the row. is_many: for more than about 16 tokens. columns: K, where it isn't a
    multiple of 64."""
    tiles = tuned("linear.gemm_many" if is_many else "linear.gemm_few", sm)
    has_x_scales = x in ("i8", "fp8e4nv")
    types = weights.types(sm) | {
        "x": f"*{x}",
        "x_scales": "*fp32" if has_x_scales else None,
        "bias": "*fp32" if has_bias else None,
        "tokens": "i32",
        "N": "i32",
        "K": "i32",
        "y": f"*{y}",
    }
    constants = weights.constants | {
        "X_GROUP": x_group,
        "TOKENS": tiles.rows,
        "FEATURES": tiles.columns,
        "DEPTH": gcd(tiles.depth, weights.group, x_group, columns),
    }
    read = f"{x}.a{x_group or 'row'}.{y}" if has_x_scales else x
    return make_variant(
        f"quantised_gemm.{read}.{weights.name}.t{tiles.rows}" + (".bias" if has_bias else ""),
        quantised_gemm,
        types,
        constants,
        tiles,
        bytes_per_token=f"({weights.bytes_of('K')}) * N / T",
        multiples_of_16=("N", "K"),
    )


def quantise_variant(sm: int, activation: str, group: int, is_static: bool) -> KernelVariant:
    """To int8. group: columns that share a scale."""
    tiles = tuned("linear.quantise_rows", sm)
    types = {
        "x": f"*{activation}",
        "static_scales": "*fp32" if is_static else None,
        "N": "i32",
        "codes": "*i8",
        "scales": "*fp32",
    }
    groups = max(1, tiles.columns // triton.next_power_of_2(group))
    return make_variant(
        f"quantise_rows.{activation}.a{group}" + (".static" if is_static else ""),
        quantise_rows,
        types,
        {"GROUP": group, "GROUPS": groups},
        for_row_of(group, tiles),
        bytes_per_token=f"3 * N + 4 * N / {group}",
        multiples_of_16=("N",),
    )


def quantise_e4m3_variant(sm: int, activation: str, width: int) -> KernelVariant:
    return make_variant(
        f"quantise_rows_e4m3.{activation}.n{width}",
        quantise_rows_e4m3,
        {"x": f"*{activation}", "codes": "*u8", "scales": "*fp32"},
        {"N": width},
        for_row_of(width, tuned("linear.quantise_rows", sm)),
        bytes_per_token=3 * width + 4,
    )
