"""Round to nearest: each weight on the nearest value of its group's grid, no data needed."""

import numpy as np
from numpy.typing import NDArray

from llmbuild.quant.grid import QuantisedMatrix, WeightGrid, empty_matrix, row_parts


def round_to_nearest(values: NDArray[np.generic], grid: WeightGrid) -> QuantisedMatrix:
    """values: [rows, columns] of any float type, columns as the grid needs.

    A symmetric group's scale is its largest magnitude over the largest code; an asymmetric one
    spans from its least value to its greatest, zero included. Scales are rounded to float16 first,
    so that codes are nearest for the scales that are kept. A group with a NaN or an infinity, or
    too large for float16, has a scale or a minimum that isn't finite.
    """
    assert not grid.zero_points, "only checkpoints bring whole zero points"
    matrix = empty_matrix(grid, values.shape)
    groups = matrix.scales.shape[1]
    for part in row_parts(values.shape):
        grouped = values[part].astype(np.float32)
        with np.errstate(over="ignore", invalid="ignore"):
            _round(grouped.reshape(len(grouped), groups, -1), matrix.take_rows(part))
    return matrix


def _round(grouped: NDArray[np.float32], out: QuantisedMatrix) -> None:
    """Fills `out`, whose arrays are views, from the values [rows, groups, columns of a group]."""
    last = (1 << out.grid.bits) - 1
    if out.minima is None:
        scales = np.abs(grouped).max(-1) / (last - out.grid.zero)
        shift = np.zeros_like(scales)
        zero = out.grid.zero
    else:
        minima = np.minimum(grouped.min(-1), 0)
        scales = (np.maximum(grouped.max(-1), 0) - minima) / last
        # Where float16 has no scale so small, all of the group would become its minimum.
        out.minima[:] = np.where(scales.astype(np.float16) == 0, 0, minima)
        shift = out.minima.astype(np.float32)
        zero = 0
    out.scales[:] = scales
    kept = out.scales.astype(np.float32)
    inverse = np.divide(1, kept, out=np.zeros_like(kept), where=kept > 0)
    codes = np.rint((grouped - shift[..., None]) * inverse[..., None]) + zero
    out.codes[:] = np.clip(codes, 0, last).reshape(out.codes.shape)
