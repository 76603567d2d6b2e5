"""Make a graph weight's values from the canonical tensors that it names, whole or in blocks."""

from collections.abc import Callable, Iterator, Sequence
from math import prod

import ml_dtypes
import numpy as np
import torch
from numpy.typing import NDArray

from llmbuild.builder.graph.step_graph import (
    CODES,
    MINIMA,
    SCALES,
    ZEROS,
    StepGraph,
    Weight,
)
from llmbuild.errors import CheckpointError
from llmbuild.quant.grid import QuantisedMatrix, join_rows
from llmbuild.quant.reader import Tensor, open_rows

# Canonical name -> its values; of a tensor that the quantisation plan puts on a grid, its codes.
# One that is a PartReader as well is asked for large tensors part by part.
ReadTensor = Callable[[str], Tensor]
_CHECKED_ITEMS = 1 << 16
_TILE_ROWS = 16  # kernels' layouts are of so many
NUMPY_DTYPES = {"fp32": np.dtype(np.float32), "bf16": np.dtype(ml_dtypes.bfloat16)}
# Those that numpy has as extension types alone, as torch calls them.
_EXTENSIONS = {
    np.dtype(ml_dtypes.bfloat16): torch.bfloat16,
    np.dtype(ml_dtypes.float8_e4m3fn): torch.float8_e4m3fn,
}


def materialise(step: StepGraph, name: str, read: ReadTensor) -> NDArray[np.generic]:
    """The values of a weight or constant of the graph, C-contiguous, in the weight's dtype; not of
    a part of a quantised matrix.

    Raises CheckpointError, naming the tensor, for one that holds NaN or an infinity.
    """
    if name in step.constants:
        return step.constants[name]
    weight = step.weights[name]
    (values,) = _blocks(weight, read, weight.shape[0])
    assert isinstance(values, np.ndarray)
    return values


def materialise_matrix(weight: Weight, read: ReadTensor) -> QuantisedMatrix:
    """The quantised matrix that a weight is a part of. Raises as materialise does."""
    (matrix,) = _blocks(weight, read, weight.shape[0])
    assert isinstance(matrix, QuantisedMatrix)
    return matrix


def weight_parts(weight: Weight, read: ReadTensor, max_bytes: int) -> Iterator[Tensor]:
    """What materialise gives, or of a matrix's codes materialise_matrix, in blocks of rows: of a
    multiple of 16 each but the last; a stack of matrices in blocks of whole ones.

    max_bytes: of a block in fp32, unless the least one has more. Raises as materialise does, when
    it comes to the block.
    """
    unit = _TILE_ROWS if len(weight.shape) == 2 else 1
    unit_bytes = 4 * unit * prod(weight.shape[1:])
    return _blocks(weight, read, max(1, max_bytes // unit_bytes) * unit)


def parts_of(matrix: QuantisedMatrix) -> dict[str, NDArray[np.generic]]:
    """The arrays of a matrix, by the part of it that a weight of the graph is."""
    parts: dict[str, NDArray[np.generic] | None] = {
        CODES: matrix.typed_codes,
        SCALES: matrix.scales,
    }
    parts |= {MINIMA: matrix.minima, ZEROS: matrix.zeros}
    return {part: values for part, values in parts.items() if values is not None}


def _blocks(weight: Weight, read: ReadTensor, step: int) -> Iterator[Tensor]:
    """The weight's rows, `step` at a time."""
    pieces: list[Tensor] = []  # of the block that is begun
    row = 0
    for source in weight.sources:
        for piece in _pieces(source, read, row, step):
            pieces.append(piece)
            row += piece.shape[0]
            if row % step == 0:
                block, pieces = _joined(weight, pieces), []
                yield block
    if pieces:
        yield _joined(weight, pieces)
    assert row == weight.shape[0]


def _pieces(source: str, read: ReadTensor, row: int, step: int) -> Iterator[Tensor]:
    """The rows of a source, which begins at a row of the weight, cut where blocks of it end."""
    shape, rows = open_rows(source, read)
    begin = 0
    while begin < shape[0]:
        end = min(shape[0], begin + step - (row + begin) % step)
        piece = rows(begin, end)
        if isinstance(piece, QuantisedMatrix):
            _check_scales(source, piece)
        else:
            check_values(source if piece.shape == shape else f"a part of {source}", piece)
        yield piece
        begin = end


def _joined(weight: Weight, pieces: Sequence[Tensor]) -> Tensor:
    """The rows of all pieces, as the weight has them."""
    if weight.grid is not None:
        matrices = [piece for piece in pieces if isinstance(piece, QuantisedMatrix)]
        assert [matrix.grid for matrix in matrices] == [weight.grid] * len(pieces)
        return join_rows(matrices)
    arrays = [piece for piece in pieces if isinstance(piece, np.ndarray)]
    assert len(arrays) == len(pieces)
    dtype = NUMPY_DTYPES[weight.dtype]
    if len(arrays) > 1:
        return np.concatenate(arrays, dtype=dtype, casting="unsafe")
    return np.ascontiguousarray(arrays[0].astype(dtype, copy=False))


def _check_scales(name: str, matrix: QuantisedMatrix) -> None:
    numbers = (matrix.scales, matrix.minima)
    if not all(each is None or np.isfinite(each).all() for each in numbers):
        raise CheckpointError(
            f"{name} holds values that are NaN, infinite, or beyond what their scales reach; the "
            "checkpoint is damaged, or the tensor has to be left unquantised: "
            f"quantisation.overrides with match {name!r} and scheme none"
        )


def check_values(name: str, tensor: NDArray[np.generic]) -> None:
    """Raises CheckpointError where some are no finite numbers."""
    rows = max(1, _CHECKED_ITEMS * len(tensor) // tensor.size)  # at a time, to hold little beside
    parts = (tensor[begin : begin + rows] for begin in range(0, len(tensor), rows))
    wrong = sum(part.size - np.count_nonzero(np.isfinite(part)) for part in parts)
    if wrong:
        raise CheckpointError(
            f"{name} holds {wrong} values of {tensor.size} that are NaN or infinite; the "
            "checkpoint is damaged, or was saved from a training run that diverged"
        )


def as_torch(values: NDArray[np.generic]) -> torch.Tensor:
    """The same memory as a torch tensor."""
    extension = _EXTENSIONS.get(values.dtype)
    if extension is None:
        return torch.from_numpy(values)
    return torch.from_numpy(values.view(f"i{values.itemsize}")).view(extension)
