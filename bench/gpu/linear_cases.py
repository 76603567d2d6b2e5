"""Quantised linears beside torch's matmul of the same weights in 16 bits."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import torch

from bench.gpu.case import TORCH_TYPES, Case, Launch, Results, Tensors, empty, normal, uniform
from llmbuild.plugins.common.model_shape import LLAMA_8B
from llmbuild.plugins.common.tuning import tuned
from llmbuild.plugins.common.weight_format import INT4, INT8, WeightFormat
from llmbuild.plugins.linear.triton import gemm_variant, gemv_variant, quantise_variant

FEW_TOKENS = 16  # that the GEMM's smaller tile has room for
FORMATS = (("bf16", INT4), ("bf16", INT8), ("fp16", INT4), ("fp16", INT8))
INT8_ACTIVATIONS = ((INT4, 64), (INT8, 64))  # weights, and columns that share a scale
SHAPES = ((LLAMA_8B.hidden, LLAMA_8B.inner), (LLAMA_8B.inner, LLAMA_8B.hidden))  # K and N


def linear_cases(sm: int, tokens: Sequence[int]) -> Iterator[Case]:
    for activation, weights in FORMATS:
        for columns, features in SHAPES:
            for count in tokens:
                yield linear_case(sm, activation, weights, columns, features, count)
    for weights, group in INT8_ACTIVATIONS:
        for columns, features in SHAPES:
            for count in tokens:
                yield int8_linear_case(sm, weights, group, columns, features, count)


def linear_case(
    sm: int, activation: str, weights: WeightFormat, columns: int, features: int, tokens: int
) -> Case:
    """By the kernel that is for as many tokens."""
    dtype = TORCH_TYPES[f"*{activation}"]
    groups = columns // weights.group if weights.group else 1
    is_int4 = weights.bits == 4
    codes = (
        uniform(torch.uint8, 0, 256, features, columns // 2)
        if is_int4
        else uniform(torch.int8, -127, 128, features, columns)
    )
    buffers = {
        "x": normal(dtype, tokens, columns),
        "codes": codes,
        "scales": uniform(torch.float16, 0.001, 0.003, features, groups),
        "y": empty(dtype, tokens, features),
    }
    arguments: dict[str, str | int] = {name: name for name in ("x", "scales", "y")}
    arguments |= {"tokens": tokens, "N": features}
    most = tuned(f"linear.gemv_{weights.bits}bit", sm).rows
    if tokens <= most:
        variant = gemv_variant(sm, weights, activation, 1 if tokens == 1 else most)
        grid: tuple[int, ...] = (-(-features // int(variant.constants["FEATURES"] or 1)),)
        arguments |= {"words": "codes", "W": columns * weights.bits // 32}
        kernel = "quantised_gemv"
    else:
        variant = gemm_variant(sm, weights, activation, activation, is_many=tokens > FEW_TOKENS)
        tile = variant.constants
        grid = (
            -(-features // int(tile["FEATURES"] or 1)),
            -(-tokens // int(tile["TOKENS"] or 1)),
        )
        arguments |= {"codes": "codes", "K": columns}
        kernel = "quantised_gemm"
    return Case(
        kernel=kernel,
        what=f"{activation} {weights.name} {columns} x {features}",
        rows=tokens,
        context=0,
        buffers=buffers,
        launches=[Launch(variant, grid, arguments)],
        results=("y",),
        moved_bytes=sum(buffer.size_bytes for buffer in buffers.values()),
        competitor=lambda tensors: _matmul(tensors, weights),
    )


def int8_linear_case(
    sm: int, weights: WeightFormat, group: int, columns: int, features: int, tokens: int
) -> Case:
    """Of activations in bf16 that are rounded to int8 first, `group` columns with one scale."""
    quantise = quantise_variant(sm, "bf16", group, is_static=False)
    is_many = tokens > FEW_TOKENS
    gemm = gemm_variant(sm, weights, "i8", "bf16", group, is_many)
    tile = gemm.constants
    case = linear_case(sm, "bf16", weights, columns, features, tokens)
    rounded = {
        "x_codes": empty(torch.int8, tokens, columns),
        "x_scales": empty(torch.float32, tokens, columns // group),
    }
    rows_grid = (tokens, -(-columns // group // int(quantise.constants["GROUPS"] or 1)))
    grid = (-(-features // int(tile["FEATURES"] or 1)), -(-tokens // int(tile["TOKENS"] or 1)))
    rounds: dict[str, str | int] = {
        "x": "x",
        "N": columns,
        "codes": "x_codes",
        "scales": "x_scales",
    }
    multiplies: dict[str, str | int] = {"tokens": tokens, "N": features, "K": columns}
    multiplies |= {name: name for name in ("x_scales", "codes", "scales", "y")}
    return replace(
        case,
        kernel="quantise_rows, quantised_gemm",
        what=f"int8 a{group} {weights.name} {columns} x {features}",
        buffers={**case.buffers, **rounded},
        launches=[
            Launch(quantise, rows_grid, rounds),
            Launch(gemm, grid, {**multiplies, "x": "x_codes"}),
        ],
    )


def _matmul(tensors: Tensors, weights: WeightFormat) -> Callable[[], Results]:
    x, codes, scales = tensors["x"], tensors["codes"], tensors["scales"]
    if weights.bits == 4:
        codes = torch.stack((codes & 15, codes >> 4), dim=-1).flatten(-2).to(torch.int8) - 8
    groups = codes.to(x.dtype).unflatten(1, (scales.shape[1], -1))
    matrix = (groups * scales.to(x.dtype)[..., None]).flatten(1).T
    return lambda: (x @ matrix,)
