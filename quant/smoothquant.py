"""SmoothQuant: channels of activations that reach far are shrunk, and the weights they meet
stretched by as much, before both are rounded to int8, or to FP8.

Xiao et al., "SmoothQuant: Accurate and Efficient Post-Training Quantization for Large Language
Models", 2022.
"""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from llmbuild.plugins.common.quantised import FP8, INT8, Numbers, round_to
from llmbuild.quant.grid import WeightGrid
from llmbuild.quant.rtn import round_to_nearest

_EXPONENTS = tuple(step / 10 for step in range(10))
_SEARCHED_ROWS = 512  # of the inputs, and of each matrix, evenly spaced
_WEIGHED_ROWS = 2048  # of the inputs, by which static scales are chosen
_SHRINKS = tuple(0.8**step for step in range(12))  # of a group's reach


def search_smoothing(
    x: torch.Tensor, matrices: Sequence[tuple[torch.Tensor, WeightGrid]], group: int, static: bool
) -> torch.Tensor:
    """What to divide each channel of x by, and to multiply the matrices' columns with: fp32
    [columns].

    x: fp32 [rows, columns]. matrices: fp32 [rows, columns] with the grid of each. group: columns of
    x that share a scale. static: whether all rows have the same scales. The exponent between reach
    of activations and of weights is the one whose rounded products are nearest; all stay as they
    are where none brings them nearer.
    """
    reach = x.abs().amax(0).clamp(min=1e-8)
    widest = torch.stack([weights.abs().amax(0) for weights, _ in matrices]).amax(0)
    x = x[:: -(-len(x) // _SEARCHED_ROWS)]
    samples = [(w[:: -(-len(w) // _SEARCHED_ROWS)], grid) for w, grid in matrices]

    def loss(smoothing: torch.Tensor) -> float:
        return sum(_loss(x, weights, grid, group, static, smoothing) for weights, grid in samples)

    candidates = [torch.ones_like(reach)]
    for exponent in _EXPONENTS:
        smoothing = reach**exponent / widest.clamp(min=1e-8) ** (1 - exponent)
        candidates.append(smoothing / smoothing.log().mean().exp())
    return min(candidates, key=loss)


def activation_numbers(grid: WeightGrid) -> Numbers:
    """What activations that meet weights on the grid are rounded to, where they are."""
    return FP8 if grid.is_fp8 else INT8


def activation_scales(
    x: torch.Tensor, importance: torch.Tensor, group: int, numbers: Numbers = INT8
) -> NDArray[np.float32]:
    """Static scales of activations, fp32 [columns / group]: of each group the share of its reach,
    over all rows of x (fp32 [rows, columns]), that loses least on some, evenly spaced.

    importance: fp32 [columns], what a column's squared error weighs. numbers: what activations are
    rounded to.
    """
    reach = x.abs().unflatten(1, (-1, group)).amax((0, 2)).clamp(min=1e-8)
    x = x[:: -(-len(x) // _WEIGHED_ROWS)]
    best = torch.full_like(reach, float("inf"))
    scales = torch.zeros_like(reach)
    for shrink in _SHRINKS:
        candidate = reach * shrink / numbers.largest
        errors = (round_to(numbers, x, group, candidate) - x).square_() * importance
        loss = errors.sum(0).unflatten(0, (-1, group)).sum(1)
        better = loss < best
        torch.where(better, loss, best, out=best)
        torch.where(better, candidate, scales, out=scales)
    return scales.numpy()


def _loss(
    x: torch.Tensor,
    weights: torch.Tensor,
    grid: WeightGrid,
    group: int,
    static: bool,
    smoothing: torch.Tensor,
) -> float:
    smooth, stretched = x / smoothing, weights * smoothing
    matrix = torch.from_numpy(round_to_nearest(stretched.numpy(), grid).dequantised())
    numbers, scales = activation_numbers(grid), None
    if static:
        found = activation_scales(smooth, stretched.square().sum(0), group, numbers)
        scales = torch.from_numpy(found)
    rounded = round_to(numbers, smooth, group, scales)
    return float((rounded @ matrix.T - x @ weights.T).square().sum()) / len(weights)
