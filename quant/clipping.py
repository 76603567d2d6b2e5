"""Scales that lose least: each group's range is shrunk as far as that lowers its rounding error.

The error is the weights' squared, each column's weighted by how strong its input is: the diagonal
of the inputs' second moments.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from llmbuild.quant.grid import QuantisedMatrix, WeightGrid, empty_matrix, row_parts

SHRINKS = tuple(1 - 0.05 * step for step in range(10))  # of a range, to about one half of it
_SEARCHED_ITEMS = 1 << 17  # weights looked at together, which stay in the cache


@dataclass(frozen=True)
class Levels:
    """The values that codes stand for: scale code + offset.

    scales, offsets: fp32 of one shape, that float16 holds; for a matrix [rows, groups, 1]. An
    offset is the minimum, and in a symmetric grid -zero scale, where a scale may be negative.
    """

    scales: torch.Tensor
    offsets: torch.Tensor
    last_code: int

    def of_group(self, group: int) -> "Levels":
        """Of one group of columns: scales and offsets [rows]."""
        return Levels(self.scales[:, group, 0], self.offsets[:, group, 0], self.last_code)

    def of_rows(self, part: slice) -> "Levels":
        """Of some rows; writes reach these levels."""
        return Levels(self.scales[part], self.offsets[part], self.last_code)

    def round(self, weights: torch.Tensor) -> torch.Tensor:
        """The nearest codes, as fp32, 0 where a scale is 0 or no number; weights broadcast with the
        scales."""
        inverse = (1 / self.scales).nan_to_num_(0, 0, 0)
        return torch.sub(weights, self.offsets).mul_(inverse).round_().clamp_(0, self.last_code)

    def values(self, codes: torch.Tensor) -> torch.Tensor:
        """What codes stand for."""
        return torch.mul(codes, self.scales).add_(self.offsets)

    def nearest(self, weights: torch.Tensor) -> torch.Tensor:
        """The nearest values of a whole matrix, fp32 [rows, columns]."""
        grouped = weights.unflatten(1, (self.scales.shape[1], -1))
        return self.values(self.round(grouped)).flatten(1)


def search_levels(
    weights: torch.Tensor,
    grid: WeightGrid,
    importance: torch.Tensor,
    shrinks: Sequence[float] = SHRINKS,
) -> Levels:
    """The best levels of weights, fp32 [rows, columns], with importance [columns]."""
    assert not grid.is_fp8, "codes are whole numbers"
    width = grid.columns_of(weights.shape[1])
    grouped, importance = weights.unflatten(1, (-1, width)), importance.view(-1, width, 1)
    shape = (*grouped.shape[:2], 1)
    # Where no candidate is a number, neither is what is kept, and whoever reads it is told.
    kept = Levels(torch.full(shape, torch.nan), torch.zeros(shape), (1 << grid.bits) - 1)
    for part in row_parts(weights.shape, _SEARCHED_ITEMS):
        _search(grouped[part], grid, importance, shrinks, kept.of_rows(part))
    return kept


def _search(
    grouped: torch.Tensor,
    grid: WeightGrid,
    importance: torch.Tensor,
    shrinks: Sequence[float],
    kept: Levels,
) -> None:
    """Fill `kept` with the best levels of weights [rows, groups, columns of a group]."""
    best = torch.full(kept.scales.shape, float("inf"))
    for scales, offsets in _candidates(grouped, grid, shrinks):
        levels = Levels(scales, offsets, kept.last_code)
        errors = levels.values(levels.round(grouped)).sub_(grouped).square_()
        error = torch.matmul(errors.unsqueeze(2), importance).squeeze(3)
        better = error < best
        for mine, its in ((best, error), (kept.scales, scales), (kept.offsets, offsets)):
            torch.where(better, its, mine, out=mine)


def round_clipped(
    values: NDArray[np.generic], grid: WeightGrid, importance: torch.Tensor
) -> QuantisedMatrix:
    """values [rows, columns] of any float type, each rounded to the nearest of the best levels."""
    matrix = empty_matrix(grid, values.shape)
    for part in row_parts(values.shape):
        weights = torch.from_numpy(values[part].astype(np.float32))
        levels = search_levels(weights, grid, importance)
        codes = levels.round(weights.unflatten(1, (levels.scales.shape[1], -1)))
        put_rows(matrix, part, codes.flatten(1), levels)
    return matrix


def put_rows(matrix: QuantisedMatrix, part: slice, codes: torch.Tensor, levels: Levels) -> None:
    """Fill some rows of a matrix."""
    matrix.codes[part] = codes.numpy()
    matrix.scales[part] = levels.scales[..., 0].numpy()
    if matrix.minima is not None:
        matrix.minima[part] = levels.offsets[..., 0].numpy()


def _candidates(
    grouped: torch.Tensor, grid: WeightGrid, shrinks: Sequence[float]
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Scales and offsets [rows, groups, 1] to choose from."""
    low, high = grouped.amin(-1, keepdim=True), grouped.amax(-1, keepdim=True)
    if not grid.symmetric:
        low, high = low.clamp(max=0), high.clamp(min=0)
        for shrink in shrinks:
            minima = _half(low * shrink)
            scales = _half((high - low) * shrink / ((1 << grid.bits) - 1))
            yield scales, torch.where(scales == 0, 0, minima)
        return
    largest = torch.maximum(-low, high)
    # There is one code more below zero than above: with a negative scale that one is on the side
    # of the largest weight.
    toward_largest = torch.where(high > -low, -largest, largest) / grid.zero
    for widest in (largest / (grid.zero - 1), toward_largest):
        for shrink in shrinks:
            scales = _half(widest * shrink)
            yield scales, -grid.zero * scales


def _half(values: torch.Tensor) -> torch.Tensor:
    """As float16 keeps them."""
    return values.half().float()
