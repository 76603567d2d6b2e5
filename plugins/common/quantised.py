"""What quantised operands stand for, in torch: the reference of the kernels that read them."""

import torch


def dequantise(
    codes: torch.Tensor,
    scales: torch.Tensor,
    minima: torch.Tensor | None,
    zero: int,
    zeros: torch.Tensor | None = None,
) -> torch.Tensor:
    """scale (code - zero), plus the minimum where there is one; fp32 [N, K].

    codes: uint8 [N, K]. scales, minima: fp16 [N, groups], each of K / groups columns. zeros: uint8
    [N, groups], each group's own zero, in place of `zero`.
    """
    grouped = codes.float().unflatten(1, (scales.shape[1], -1))
    grouped = grouped - (zero if zeros is None else zeros.float()[..., None])
    grouped = grouped * scales.float()[..., None]
    if minima is not None:
        grouped = grouped + minima.float()[..., None]
    return grouped.flatten(1)


def round_to_int8(x: torch.Tensor, group: int, scales: torch.Tensor | None = None) -> torch.Tensor:
    """x: fp32 [T, K] as int8 in groups of columns represents it: each value the nearest multiple
    of its group's scale, ties to the even one.

    scales: fp32 [K / group], each with a finite reciprocal, for all rows alike; values beyond 127
    of them become 127 of them, infinities too, and a NaN stays. By default a group's scale is its
    largest magnitude / 127.
    """
    grouped = x.unflatten(1, (-1, group))
    if scales is not None:
        codes = torch.round(grouped * (1 / scales)[:, None]).clamp(-127, 127)
        return (codes * scales[:, None]).flatten(1)
    largest = grouped.abs().amax(-1, keepdim=True)
    inverse = 127 / largest
    inverse = torch.where(inverse.isfinite(), inverse, 0)
    return (torch.round(grouped * inverse) * (largest / 127)).flatten(1)
