"""Quantised matrices: whole numbers, or FP8 ones, on a grid of scales, one for each group of a
row's columns."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from ml_dtypes import float8_e4m3fn
from numpy.typing import NDArray

GROUP_UNIT = 32  # a group is so many columns, or a multiple of it
FP8_LARGEST = 448.0

Scales = NDArray[np.float16 | np.float32]
# Of an array, by its first axes.
Rows = NDArray[np.intp] | slice | int | tuple[slice | int, ...]

_PART_ITEMS = 1 << 20


@dataclass(frozen=True)
class WeightGrid:
    """The values that a quantised weight can have.

    bits: 4 or 8. group_size: neighbouring columns that share a scale, a multiple of GROUP_UNIT
    that divides the row; 0 for the whole row. symmetric: codes stand around zero; otherwise a group
    has a minimum, too, or with zero_points the code that stands for 0. is_fp8: codes are the bytes
    of FP8 numbers, OCP's E4M3 without infinities, in place of whole numbers.
    """

    bits: int
    group_size: int
    symmetric: bool
    zero_points: bool = False
    is_fp8: bool = False

    def __post_init__(self) -> None:
        assert not (self.symmetric and self.zero_points)
        assert not self.is_fp8 or (self.bits == 8 and self.symmetric)

    @property
    def has_minima(self) -> bool:
        """Whether a group has a minimum."""
        return not self.symmetric and not self.zero_points

    @property
    def zero(self) -> int:
        """The code of 0 in a symmetric grid: of whole numbers, half of the codes lie below."""
        return 0 if self.is_fp8 else 1 << (self.bits - 1)

    @property
    def largest(self) -> float:
        """The largest weight of a symmetric grid, in scales."""
        return FP8_LARGEST if self.is_fp8 else (1 << self.bits) - 1 - self.zero

    @property
    def scale_dtype(self) -> np.dtype[np.float16] | np.dtype[np.float32]:
        """Of scales. GPUs take those of FP8 numbers in fp32."""
        return np.dtype(np.float32) if self.is_fp8 else np.dtype(np.float16)

    def columns_of(self, width: int) -> int:
        """Columns of a group in rows of this width."""
        return self.group_size or width

    def fits(self, width: int) -> bool:
        """Whether rows of this width can lie on the grid."""
        return width % self.columns_of(width) == 0 and width % GROUP_UNIT == 0

    def describe(self) -> str:
        """In words, for reports: int4, groups of 64, symmetric; fp8, one group a row."""
        groups = f"groups of {self.group_size}" if self.group_size else "one group a row"
        if self.is_fp8:
            return f"fp8, {groups}"
        offset = "with zero points" if self.zero_points else "with minimum"
        return f"int{self.bits}, {groups}, {'symmetric' if self.symmetric else offset}"


@dataclass(frozen=True)
class QuantisedMatrix:
    """w = scale (code - zero) in a symmetric grid, and in one of zero points, whose groups have a
    zero each; else scale code + minimum.

    codes: uint8 [rows, columns], from 0 to 2^bits - 1, or the bytes of FP8 numbers. scales, in the
    grid's dtype, and minima where the grid has them: [rows, groups]. zeros, where the grid has zero
    points: uint8 [rows, groups], codes. All have one axis more, the first, in a stack of matrices.
    """

    grid: WeightGrid
    codes: NDArray[np.uint8]
    scales: Scales
    minima: NDArray[np.float16] | None = None
    zeros: NDArray[np.uint8] | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """Rows and columns, after the number of matrices of a stack."""
        return self.codes.shape

    @property
    def size(self) -> int:
        """Number of weights."""
        return self.codes.size

    @property
    def arrays(self) -> Sequence[NDArray[np.generic]]:
        """Codes and scales, and minima or zeros where the grid has such."""
        all_four = (self.codes, self.scales, self.minima, self.zeros)
        return [array for array in all_four if array is not None]

    @property
    def typed_codes(self) -> NDArray[np.generic]:
        """The codes in the type of what they are: FP8 numbers, or uint8. The same memory."""
        return self.codes.view(float8_e4m3fn) if self.grid.is_fp8 else self.codes

    def dequantised(self) -> NDArray[np.float32]:
        """The values, float32, of the codes' shape."""
        *rows, columns = self.shape
        width = self.grid.columns_of(columns)
        grouped = self.typed_codes.reshape(*rows, -1, width).astype(np.float32)
        if self.zeros is not None:
            grouped -= self.zeros.astype(np.float32)[..., None]
        elif self.minima is None:
            grouped -= self.grid.zero
        with np.errstate(invalid="ignore"):  # of a scale that is no number, which is refused later
            grouped *= self.scales.astype(np.float32)[..., None]
        if self.minima is not None:
            grouped += self.minima.astype(np.float32)[..., None]
        return grouped.reshape(self.codes.shape)

    def fill(self, values: "QuantisedMatrix") -> None:
        """Write a matrix's codes and scales into this one's; of a stack, into all of it."""
        assert values.grid == self.grid
        for own, given in zip(self.arrays, values.arrays, strict=True):
            own[...] = given

    def take_rows(self, rows: Rows) -> "QuantisedMatrix":
        """Some rows, in the order given; of a stack, some matrices, and with another index the same
        rows of each."""
        minima = None if self.minima is None else self.minima[rows]
        zeros = None if self.zeros is None else self.zeros[rows]
        return QuantisedMatrix(self.grid, self.codes[rows], self.scales[rows], minima, zeros)

    def take_columns(self, begin: int, end: int) -> "QuantisedMatrix":
        """Columns [begin, end), which must be whole groups; where a row is one group, any columns
        keep its scale. A view."""
        groups = slice(0, 1)
        if self.grid.group_size:
            assert begin % self.grid.group_size == end % self.grid.group_size == 0
            groups = slice(begin // self.grid.group_size, end // self.grid.group_size)
        minima = None if self.minima is None else self.minima[..., groups]
        zeros = None if self.zeros is None else self.zeros[..., groups]
        codes, scales = self.codes[..., begin:end], self.scales[..., groups]
        return QuantisedMatrix(self.grid, codes, scales, minima, zeros)


def join_rows(parts: Sequence[QuantisedMatrix]) -> QuantisedMatrix:
    """The rows of all parts, which have one grid, one after the other."""
    if len(parts) == 1:
        return parts[0]
    minima = [part.minima for part in parts if part.minima is not None]
    zeros = [part.zeros for part in parts if part.zeros is not None]
    return QuantisedMatrix(
        parts[0].grid,
        np.concatenate([part.codes for part in parts]),
        np.concatenate([part.scales for part in parts]),
        np.concatenate(minima) if minima else None,
        np.concatenate(zeros) if zeros else None,
    )


def empty_matrix(grid: WeightGrid, shape: tuple[int, ...]) -> QuantisedMatrix:
    """A matrix to be filled."""
    *rows, columns = shape
    groups = (*rows, columns // grid.columns_of(columns))
    return QuantisedMatrix(
        grid,
        np.empty(shape, np.uint8),
        np.empty(groups, grid.scale_dtype),
        np.empty(groups, np.float16) if grid.has_minima else None,
        np.empty(groups, np.uint8) if grid.zero_points else None,
    )


def row_parts(shape: tuple[int, ...], part_items: int | None = None) -> Iterator[slice]:
    """Slices of rows to be quantised one after the other, so that little is held beside the
    result."""
    step = max(1, (part_items or _PART_ITEMS) // shape[1])
    for begin in range(0, shape[0], step):
        yield slice(begin, min(begin + step, shape[0]))
