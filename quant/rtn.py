"""Round to nearest: each weight on the nearest value of its group's grid, no data needed."""

import numpy as np
from numpy.typing import NDArray

from llmbuild.quant.grid import QuantisedMatrix, WeightGrid

_PART_ITEMS = 1 << 20  # quantised at a time, so that little is held beside the result


def round_to_nearest(values: NDArray[np.generic], grid: WeightGrid) -> QuantisedMatrix:
    """values: [rows, columns] of any float type, columns as the grid needs.

    A symmetric group's scale is its largest magnitude over the largest code; an asymmetric one
    spans from its least value to its greatest, zero included. Scales are rounded to float16 first,
    so that codes are nearest for the scales that are kept. A group with a NaN or an infinity, or
    too large for float16, has a scale or a minimum that isn't finite.
    """
    rows, columns = values.shape
    groups = columns // grid.columns_of(columns)
    matrix = QuantisedMatrix(
        grid,
        np.empty((rows, columns), np.uint8),
        np.empty((rows, groups), np.float16),
        None if grid.symmetric else np.empty((rows, groups), np.float16),
    )
    step = max(1, _PART_ITEMS // columns)
    for begin in range(0, rows, step):
        part = slice(begin, begin + step)
        grouped = values[part].astype(np.float32).reshape(-1, groups, columns // groups)
        with np.errstate(over="ignore", invalid="ignore"):
            _round(grouped, matrix.take_rows(part))
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
