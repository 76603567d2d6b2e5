"""Random quantised matrices for tests of kernels that read them."""

import numpy as np

from llmbuild.plugins.common.weight_format import WeightFormat
from llmbuild.quant.grid import QuantisedMatrix, WeightGrid


def random_matrix(weights: WeightFormat, rows: int, columns: int) -> QuantisedMatrix:
    """Every code is likely; values are about 1."""
    rng = np.random.default_rng([rows, columns])
    offsets = weights.offsets
    grid = WeightGrid(weights.bits, weights.group, not offsets, zero_points=offsets == "zeros")
    shape = (rows, columns // grid.columns_of(columns))
    scales = rng.uniform(0.5, 2, shape).astype(np.float16) / np.float16(1 << (weights.bits - 1))
    minima = rng.uniform(-2, -0.5, shape).astype(np.float16) if grid.has_minima else None
    zeros = rng.integers(0, 1 << grid.bits, shape, np.uint8) if grid.zero_points else None
    codes = rng.integers(0, 1 << grid.bits, (rows, columns), np.uint8)
    return QuantisedMatrix(grid, codes, scales, minima, zeros)
