"""linear: y = x W^T + b, weights in their stored type or on a grid, accumulation in fp32."""

import torch

from llmbuild.plugins.common.quantised import FP8, INT8, dequantise, round_to


@torch.library.custom_op("llmbuild::linear", mutates_args=())
def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """x: fp32 [T, K]. weight: fp32 or bf16 [N, K]. bias: [N] or None. Returns fp32 [T, N]."""
    return torch.nn.functional.linear(x, weight.float(), None if bias is None else bias.float())


@linear.register_fake
def _(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return x.new_empty((x.shape[0], weight.shape[0]))


@torch.library.custom_op("llmbuild::quantised_linear", mutates_args=())
def quantised_linear(
    x: torch.Tensor,
    codes: torch.Tensor,
    scales: torch.Tensor,
    minima: torch.Tensor | None,
    bias: torch.Tensor | None,
    zero: int,
    activation_group: int,
    zeros: torch.Tensor | None = None,
    activation_scales: torch.Tensor | None = None,
) -> torch.Tensor:
    """linear with weights on a grid: scale (code - zero), plus the group's minimum if it has one.

    x: fp32 [T, K]. codes: [N, K], uint8, or float8_e4m3fn, whose zero is 0. scales: [N, groups],
    fp16, of float8 fp32. minima: fp16 [N, groups]. bias: fp32 [N] or None. zeros: uint8
    [N, groups], each group's own zero, in place of `zero`. activation_group: columns of x that are
    rounded to int8 with one scale before they meet the weights, or to float8 where codes are; 0
    leaves x as it is. activation_scales: fp32 [K / activation_group], those scales for every row;
    by default each row has its own, of its largest values. Returns fp32 [T, N].
    """
    if activation_group:
        numbers = FP8 if codes.dtype == torch.float8_e4m3fn else INT8
        x = round_to(numbers, x, activation_group, activation_scales)
    return torch.nn.functional.linear(x, dequantise(codes, scales, minima, zero, zeros), bias)


@quantised_linear.register_fake
def _(
    x: torch.Tensor,
    codes: torch.Tensor,
    scales: torch.Tensor,
    minima: torch.Tensor | None,
    bias: torch.Tensor | None,
    zero: int,
    activation_group: int,
    zeros: torch.Tensor | None = None,
    activation_scales: torch.Tensor | None = None,
) -> torch.Tensor:
    return x.new_empty((x.shape[0], codes.shape[0]))
