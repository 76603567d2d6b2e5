"""What quantised operands stand for, in torch: the reference of the kernels that read them."""

from collections.abc import Callable
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Numbers:
    """What activations are rounded to, in scales. largest: the largest magnitude. nearest: gives
    the nearest ones of values that reach no further, ties to even."""

    largest: float
    nearest: Callable[[torch.Tensor], torch.Tensor]


INT8 = Numbers(127, torch.round)
# OCP's E4M3, whose numbers are all finite.
FP8 = Numbers(448, lambda x: x.to(torch.float8_e4m3fn).float())


def dequantise(
    codes: torch.Tensor,
    scales: torch.Tensor,
    minima: torch.Tensor | None,
    zero: int,
    zeros: torch.Tensor | None = None,
) -> torch.Tensor:
    """scale (code - zero), plus the minimum where there is one; fp32 [N, K].

    codes: uint8 or float8_e4m3fn [N, K]. scales: fp16 or fp32 [N, groups], each of K / groups
    columns; minima: fp16, likewise. zeros: uint8 [N, groups], each group's own zero, in place of
    `zero`.
    """
    grouped = codes.float().unflatten(1, (scales.shape[1], -1))
    grouped = grouped - (zero if zeros is None else zeros.float()[..., None])
    grouped = grouped * scales.float()[..., None]
    if minima is not None:
        grouped = grouped + minima.float()[..., None]
    return grouped.flatten(1)


def round_to(
    numbers: Numbers, x: torch.Tensor, group: int, scales: torch.Tensor | None = None
) -> torch.Tensor:
    """x: fp32 [T, K] as such numbers in groups of columns represent it: each value the nearest of
    them times its group's scale.

    scales: fp32 [K / group], each with a finite reciprocal, for all rows alike; values beyond the
    largest number become it, infinities too, and a NaN stays. By default a group's scale is its
    largest magnitude over the largest number.
    """
    most = numbers.largest
    grouped = x.unflatten(1, (-1, group))
    if scales is not None:
        codes = numbers.nearest((grouped * (1 / scales)[:, None]).clamp(-most, most))
        return (codes * scales[:, None]).flatten(1)
    largest = grouped.abs().amax(-1, keepdim=True)
    inverse = most / largest
    inverse = torch.where(inverse.isfinite(), inverse, 0)
    return (numbers.nearest(grouped * inverse) * (largest / most)).flatten(1)


def round_to_int8(x: torch.Tensor, group: int, scales: torch.Tensor | None = None) -> torch.Tensor:
    """round_to of INT8."""
    return round_to(INT8, x, group, scales)
