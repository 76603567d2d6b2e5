"""A model's tensors as the quantisation plan wants them: each quantised when it is read."""

from collections.abc import Callable, Iterator, Sequence
from itertools import product
from math import prod
from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from llmbuild.quant.grid import QuantisedMatrix, WeightGrid, empty_matrix
from llmbuild.quant.plan import QuantPlan
from llmbuild.quant.rtn import round_to_nearest

Tensor = NDArray[np.generic] | QuantisedMatrix
Ranges = tuple[tuple[int, int], ...]  # of an axis: begin and end of each, one after the other

_BLOCK_ITEMS = 1 << 19  # read at a time: 2 MB as fp32, which take some 10 MB to round


class Tensors(Protocol):
    """A model's tensors by canonical name."""

    def shape(self, name: str) -> tuple[int, ...]:
        """A tensor's, whether it is quantised or not."""
        ...

    def read(self, name: str) -> NDArray[np.generic]:
        """The values, row-major."""
        ...

    def has_rows(self, name: str) -> bool:
        """Whether some rows (along the first axis) can be read without the rest."""
        ...

    def read_rows(self, name: str, begin: int, end: int) -> NDArray[np.generic]:
        """The values of some rows."""
        ...

    def stored_grid(self, name: str) -> WeightGrid | None:
        """The grid that the checkpoint has a matrix on, None for any other tensor."""
        ...

    def read_codes(self, name: str, rows: tuple[int, int] | None = None) -> QuantisedMatrix:
        """A matrix that has a stored grid, or some rows of it, as it is stored."""
        ...


class Calibrated(Protocol):
    """What calibration made of a model's tensors."""

    def __contains__(self, name: str) -> bool: ...

    def get(self, name: str, rows: tuple[int, int] | None = None) -> Tensor | None:
        """A tensor that it changed, or some rows of it; None for any other."""
        ...


@runtime_checkable
class PartReader(Protocol):
    """Gives tensors whole or in part."""

    def __call__(self, name: str) -> Tensor: ...

    def shape(self, name: str) -> tuple[int, ...]:
        """A tensor's, whether it is quantised or not."""
        ...

    def has_rows(self, name: str) -> bool:
        """Whether a part is read without the whole; otherwise each part costs a reading of it."""
        ...

    def read_part(self, name: str, parts: Sequence[Ranges]) -> Tensor:
        """The given ranges of each axis, as they are in the whole tensor, whose rows are rounded
        as wholes. A quantised matrix's columns are cut between groups."""
        ...


class PlannedReader:
    """Gives tensors by name; those of the plan as matrices on its grids: as calibration made them,
    without loss where the checkpoint stores them on this very grid, else rounded to nearest.

    Without `calibrated`, those that the plan rounds for their inputs come as they are.
    """

    def __init__(
        self, tensors: Tensors, plan: QuantPlan, calibrated: Calibrated | None = None
    ) -> None:
        self._tensors, self._plan, self._calibrated = tensors, plan, calibrated

    def __call__(self, name: str) -> Tensor:
        return self._read(name, None)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._tensors.shape(name)

    def has_rows(self, name: str) -> bool:
        return self._is_calibrated(name) or self._tensors.has_rows(name)

    def read_part(self, name: str, parts: Sequence[Ranges]) -> Tensor:
        """As PartReader has it. Beside the part a few MB are held (of a stack, an expert), or all
        of a tensor that has no rows."""
        rows, *others = parts
        count, *row_shape = self.shape(name)
        assert len(others) == len(row_shape)
        step = max(1, _BLOCK_ITEMS // prod(row_shape))
        whole = None if self.has_rows(name) else self(name)
        part = None
        for at, (begin, end) in _steps(rows, step if whole is None else count):
            if whole is None:
                block = self._read(name, (begin, end))
            else:
                block = _view(whole, (slice(begin, end),))
            if part is None:
                part = _empty_like(block, [_length(ranges) for ranges in parts])
            _copy(block, _view(part, (slice(at, at + end - begin),)), others)
        assert part is not None, "no rows are wanted"
        return part

    def _is_calibrated(self, name: str) -> bool:
        return self._calibrated is not None and name in self._calibrated

    def _read(self, name: str, rows: tuple[int, int] | None) -> Tensor:
        """Some rows, or all."""
        found = None if self._calibrated is None else self._calibrated.get(name, rows)
        if found is not None:
            return found
        grid = self._plan.weights.get(name)
        if grid is None or name in self._plan.methods:
            return self._values(name, rows)
        if self._tensors.stored_grid(name) == grid:
            return self._tensors.read_codes(name, rows)
        return round_to_nearest(self._values(name, rows), grid)

    def _values(self, name: str, rows: tuple[int, int] | None) -> NDArray[np.generic]:
        return self._tensors.read(name) if rows is None else self._tensors.read_rows(name, *rows)


def planned_reader(
    tensors: Tensors, plan: QuantPlan, calibrated: Calibrated | None = None
) -> PlannedReader:
    """See PlannedReader."""
    return PlannedReader(tensors, plan, calibrated)


def open_rows(
    name: str, read: Callable[[str], Tensor]
) -> tuple[tuple[int, ...], Callable[[int, int], Tensor]]:
    """A tensor's shape, and what gives its rows [begin, end): all of the tensor is held meanwhile,
    unless `read` is a PartReader that can do without."""
    if isinstance(read, PartReader) and read.has_rows(name):
        shape = read.shape(name)
        others = [((0, size),) for size in shape[1:]]
        return shape, lambda begin, end: read.read_part(name, [((begin, end),), *others])
    whole = read(name)

    def rows(begin: int, end: int) -> Tensor:
        return whole if end - begin == whole.shape[0] else _view(whole, (slice(begin, end),))

    return whole.shape, rows


def value_reader(read: Callable[[str], Tensor]) -> Callable[[str], NDArray[np.generic]]:
    """The same tensors as values: quantised ones dequantised."""

    def read_values(name: str) -> NDArray[np.generic]:
        tensor = read(name)
        return tensor.dequantised() if isinstance(tensor, QuantisedMatrix) else tensor

    return read_values


def _length(ranges: Ranges) -> int:
    return sum(end - begin for begin, end in ranges)


def _steps(ranges: Ranges, step: int) -> Iterator[tuple[int, tuple[int, int]]]:
    """The ranges in steps, each with the number of what comes before it."""
    at = 0
    for first, last in ranges:
        for begin in range(first, last, step):
            end = min(begin + step, last)
            yield at, (begin, end)
            at += end - begin


def _empty_like(block: Tensor, shape: Sequence[int]) -> Tensor:
    if isinstance(block, QuantisedMatrix):
        return empty_matrix(block.grid, tuple(shape))
    return np.empty(shape, block.dtype)


def _view(tensor: Tensor, index: tuple[slice, ...]) -> Tensor:
    """A slice of each axis; axes that aren't given stay whole."""
    if not isinstance(tensor, QuantisedMatrix):
        return tensor[index]
    if len(index) < len(tensor.shape):
        return tensor.take_rows(index)
    *rows, columns = index
    return tensor.take_rows(tuple(rows)).take_columns(columns.start, columns.stop)


def _copy(source: Tensor, target: Tensor, parts: Sequence[Ranges]) -> None:
    """All rows, and the given ranges of the source's other axes."""
    for moves in product(*map(_moves, parts)):
        taken = _view(source, (slice(None), *(of for of, _ in moves)))
        place = _view(target, (slice(None), *(to for _, to in moves)))
        if isinstance(place, QuantisedMatrix):
            assert isinstance(taken, QuantisedMatrix)
            place.fill(taken)
        else:
            assert isinstance(taken, np.ndarray)
            place[...] = taken


def _moves(ranges: Ranges) -> list[tuple[slice, slice]]:
    """Where each range is, and where it goes."""
    steps = _steps(ranges, max(1, _length(ranges)))
    return [(slice(begin, end), slice(at, at + end - begin)) for at, (begin, end) in steps]
