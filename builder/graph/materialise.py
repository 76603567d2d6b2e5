"""Make a graph weight's values from the canonical tensors that it names, one weight at a time."""

from collections.abc import Callable

import ml_dtypes
import numpy as np
import torch
from numpy.typing import NDArray

from llmbuild.builder.graph.step_graph import StepGraph
from llmbuild.errors import CheckpointError

ReadTensor = Callable[[str], NDArray[np.generic]]  # canonical name -> values
_CHECKED_ITEMS = 1 << 16
NUMPY_DTYPES = {"fp32": np.dtype(np.float32), "bf16": np.dtype(ml_dtypes.bfloat16)}


def materialise(step: StepGraph, name: str, read: ReadTensor) -> NDArray[np.generic]:
    """The values of a weight or constant of the graph, C-contiguous, in the weight's dtype.

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


def _finite(read: ReadTensor, name: str) -> NDArray[np.generic]:
    values = read(name)
    rows = max(1, _CHECKED_ITEMS * len(values) // values.size)  # at a time, to hold little beside
    parts = (values[begin : begin + rows] for begin in range(0, len(values), rows))
    wrong = sum(part.size - np.count_nonzero(np.isfinite(part)) for part in parts)
    if wrong:
        raise CheckpointError(
            f"{name} holds {wrong} values of {values.size} that are NaN or infinite; the "
            "checkpoint is damaged, or was saved from a training run that diverged"
        )
    return values


def as_torch(values: NDArray[np.generic]) -> torch.Tensor:
    """The same memory as a torch tensor; numpy has bfloat16 only as an extension type."""
    if values.dtype == NUMPY_DTYPES["bf16"]:
        return torch.from_numpy(values.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(values)
