"""What rounding to nearest loses, of matrices that calibration doesn't judge by their inputs."""

import numpy as np

from llmbuild.builder.graph.materialise import ReadTensor
from llmbuild.quant.grid import QuantisedMatrix, row_parts
from llmbuild.quant.plan import QuantPlan
from llmbuild.quant.reader import PlannedReader, Tensors, open_rows


def rounding_losses(tensors: Tensors, plan: QuantPlan, read: ReadTensor) -> dict[str, float]:
    """The squared error of each such matrix's weights, relative to theirs; 0 where stored codes are
    kept. read: gives matrices on the plan's grids. One matrix is held at a time, or of those that
    can be read in parts, a part."""
    return {
        name: 0.0 if tensors.stored_grid(name) == grid else _relative_error(tensors, read, name)
        for name, grid in plan.weights.items()
        if name not in plan.methods
    }


def _relative_error(tensors: Tensors, read: ReadTensor, name: str) -> float:
    shape, matrix_rows = open_rows(name, read)
    _, value_rows = open_rows(name, PlannedReader(tensors, QuantPlan({})))
    lost = total = 0.0
    for part in row_parts(shape):
        matrix = matrix_rows(part.start, part.stop)
        values = value_rows(part.start, part.stop)
        assert isinstance(matrix, QuantisedMatrix)
        assert isinstance(values, np.ndarray)
        exact = values.astype(np.float32)
        error = matrix.dequantised() - exact
        lost += float(np.square(error, dtype=np.float64).sum())
        total += float(np.square(exact, dtype=np.float64).sum())
    return lost / total if total else 0.0
