"""Make a graph weight's values from the canonical tensors that it names, one weight at a time."""

from collections.abc import Callable

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

# Canonical name -> its values; of a tensor that the quantisation plan puts on a grid, its codes.
ReadTensor = Callable[[str], NDArray[np.generic] | QuantisedMatrix]
_CHECKED_ITEMS = 1 << 16
NUMPY_DTYPES = {"fp32": np.dtype(np.float32), "bf16": np.dtype(ml_dtypes.bfloat16)}


def materialise(step: StepGraph, name: str, read: ReadTensor) -> NDArray[np.generic]:
    """The values of a weight or constant of the graph, C-contiguous, in the weight's dtype; not of
    a part of a quantised matrix.

    Raises CheckpointError, naming the tensor, for one that holds NaN or an infinity.
    """
    if name in step.constants:
        return step.constants[name]
    weight = step.weights[name]
    dtype = NUMPY_DTYPES[weight.dtype]
    if len(weight.sources) == 1:
        return np.ascontiguousarray(_finite(read, weight.sources[0]).astype(dtype, copy=False))
    values = np.empty(weight.shape, dtype)
    row = 0
    for source in weight.sources:
        part = _finite(read, source)
        values[row : row + part.shape[0]] = part
        row += part.shape[0]
    assert row == weight.shape[0]
    return values


def materialise_matrix(weight: Weight, read: ReadTensor) -> QuantisedMatrix:
    """The quantised matrix that a weight is a part of. Raises as materialise does."""
    matrices = []
    for source in weight.sources:
        matrix = read(source)
        assert isinstance(matrix, QuantisedMatrix)
        assert matrix.grid == weight.grid
        for numbers in (matrix.scales, matrix.minima):
            if numbers is not None and not np.isfinite(numbers).all():
                raise CheckpointError(
                    f"{source} holds values that are NaN, infinite, or beyond what float16 scales "
                    "reach; the checkpoint is damaged, or the tensor has to be left unquantised: "
                    f"quantisation.overrides with match {source!r} and scheme none"
                )
        matrices.append(matrix)
    return join_rows(matrices)


def parts_of(matrix: QuantisedMatrix) -> dict[str, NDArray[np.generic]]:
    """The arrays of a matrix, by the part of it that a weight of the graph is."""
    parts: dict[str, NDArray[np.generic] | None] = {CODES: matrix.codes, SCALES: matrix.scales}
    parts |= {MINIMA: matrix.minima, ZEROS: matrix.zeros}
    return {part: values for part, values in parts.items() if values is not None}


def _finite(read: ReadTensor, name: str) -> NDArray[np.generic]:
    values = read(name)
    assert isinstance(values, np.ndarray)
    _check_finite(name, values)
    return values


def _check_finite(name: str, values: NDArray[np.generic]) -> None:
    rows = max(1, _CHECKED_ITEMS * len(values) // values.size)  # at a time, to hold little beside
    parts = (values[begin : begin + rows] for begin in range(0, len(values), rows))
    wrong = sum(part.size - np.count_nonzero(np.isfinite(part)) for part in parts)
    if wrong:
        raise CheckpointError(
            f"{name} holds {wrong} values of {values.size} that are NaN or infinite; the "
            "checkpoint is damaged, or was saved from a training run that diverged"
        )


def as_torch(values: NDArray[np.generic]) -> torch.Tensor:
    """The same memory as a torch tensor; numpy has bfloat16 only as an extension type."""
    if values.dtype == NUMPY_DTYPES["bf16"]:
        return torch.from_numpy(values.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(values)
