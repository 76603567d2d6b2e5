"""What quantised operands stand for, in torch: the reference of the kernels that read them."""

import torch


def dequantise(
    codes: torch.Tensor, scales: torch.Tensor, minima: torch.Tensor | None, zero: int
) -> torch.Tensor:
    """scale (code - zero), plus the minimum where there is one; fp32 [N, K].

    codes: uint8 [N, K]. scales, minima: fp16 [N, groups], each of K / groups columns.
    """
    groups = scales.shape[1]
    grouped = (codes.float() - zero).unflatten(1, (groups, -1)) * scales.float()[..., None]
    if minima is not None:
        grouped = grouped + minima.float()[..., None]
    return grouped.flatten(1)


def round_to_int8(x: torch.Tensor, group: int) -> torch.Tensor:
    """x: fp32 [T, K] as int8 in groups of columns represents it: each value the nearest multiple
    of its group's largest magnitude / 127, ties to the even one."""
    grouped = x.unflatten(1, (-1, group))
    largest = grouped.abs().amax(-1, keepdim=True)
    inverse = 127 / largest
    inverse = torch.where(inverse.isfinite(), inverse, 0)
    return (torch.round(grouped * inverse) * (largest / 127)).flatten(1)
