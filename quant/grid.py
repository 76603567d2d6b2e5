"""Quantised matrices: whole numbers on a grid of scales, one for each group of a row's columns."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

GROUP_UNIT = 32  # a group is so many columns, or a multiple of it


@dataclass(frozen=True)
class WeightGrid:
    """The values that a quantised weight can have.

    bits: 4 or 8. group_size: neighbouring columns that share a scale, a multiple of GROUP_UNIT
    that divides the row; 0 for the whole row. symmetric: codes stand around zero; otherwise a group
    has a minimum, too.
    """

    bits: int
    group_size: int
    symmetric: bool

    @property
    def zero(self) -> int:
        """The code of 0 in a symmetric grid: half of the codes lie below."""
        return 1 << (self.bits - 1)

    def columns_of(self, width: int) -> int:
        """Columns of a group in rows of this width."""
        return self.group_size or width

    def fits(self, width: int) -> bool:
        """Whether rows of this width can lie on the grid."""
        return width % self.columns_of(width) == 0 and width % GROUP_UNIT == 0

    def describe(self) -> str:
        """In words, for reports: int4 in groups of 64, symmetric."""
        groups = f"groups of {self.group_size}" if self.group_size else "one group a row"
        return f"int{self.bits}, {groups}, {'symmetric' if self.symmetric else 'with minimum'}"


@dataclass(frozen=True)
class QuantisedMatrix:
    """w = scale (code - zero) in a symmetric grid, else scale code + minimum.

    codes: uint8 [rows, columns], from 0 to 2^bits - 1. scales, and minima unless symmetric: float16
    [rows, groups].
    """

    grid: WeightGrid
    codes: NDArray[np.uint8]
    scales: NDArray[np.float16]
    minima: NDArray[np.float16] | None = None

    @property
    def size(self) -> int:
        """Number of weights."""
        return self.codes.size

    def dequantised(self) -> NDArray[np.float32]:
        """The values, float32 [rows, columns]."""
        width = self.grid.columns_of(self.codes.shape[1])
        grouped = self.codes.reshape(len(self.codes), -1, width).astype(np.float32)
        if self.minima is None:
            grouped -= self.grid.zero
        grouped *= self.scales.astype(np.float32)[..., None]
        if self.minima is not None:
            grouped += self.minima.astype(np.float32)[..., None]
        return grouped.reshape(self.codes.shape)

    def take_rows(self, rows: NDArray[np.intp] | slice) -> "QuantisedMatrix":
        """Some rows, in the order given."""
        minima = None if self.minima is None else self.minima[rows]
        return QuantisedMatrix(self.grid, self.codes[rows], self.scales[rows], minima)


def join_rows(parts: Sequence[QuantisedMatrix]) -> QuantisedMatrix:
    """The rows of all parts, which have one grid, one after the other."""
    if len(parts) == 1:
        return parts[0]
    minima = [part.minima for part in parts if part.minima is not None]
    return QuantisedMatrix(
        parts[0].grid,
        np.concatenate([part.codes for part in parts]),
        np.concatenate([part.scales for part in parts]),
        np.concatenate(minima) if minima else None,
    )
