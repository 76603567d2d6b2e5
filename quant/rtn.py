"""Round to nearest: each weight on the nearest value of its group's grid, no data needed."""

import numpy as np
from ml_dtypes import float8_e4m3fn
from numpy.typing import NDArray

from llmbuild.quant.grid import QuantisedMatrix, WeightGrid, empty_matrix, row_parts

_SMALLEST_SCALE = np.finfo(np.float32).smallest_normal  # whose reciprocal fp32 holds


def round_to_nearest(values: NDArray[np.generic], grid: WeightGrid) -> QuantisedMatrix:
    """values: [rows, columns] of any float type, columns as the grid needs; or a stack of such.

    A symmetric group's scale is its largest magnitude over the largest code; an asymmetric one
    spans from its least value to its greatest, zero included. Scales are rounded to the grid's
    dtype first, so that codes are nearest for the scales that are kept, ties to even. A group with
    a NaN or an infinity, or too large for float16, has a scale or a minimum that isn't finite.
    """
    assert not grid.zero_points, "only checkpoints bring whole zero points"
    whole = empty_matrix(grid, values.shape)
    for index in np.ndindex(values.shape[:-2]):
        matrix, rows = whole.take_rows(index), values[index]
        for part in row_parts(rows.shape):
            grouped = rows[part].astype(np.float32)
            shape = (len(grouped), matrix.scales.shape[1], -1)
            with np.errstate(over="ignore", invalid="ignore"):
                _round(grouped.reshape(shape), matrix.take_rows(part))
    return whole


def _round(grouped: NDArray[np.float32], out: QuantisedMatrix) -> None:
    """Fills `out`, whose arrays are views, from the values [rows, groups, columns of a group]."""
    if out.minima is None:
        scales = np.abs(grouped).max(-1) / out.grid.largest
        shift = np.zeros_like(scales)
        zero = out.grid.zero
    else:
        minima = np.minimum(grouped.min(-1), 0)
        scales = (np.maximum(grouped.max(-1), 0) - minima) / ((1 << out.grid.bits) - 1)
        # Where float16 has no scale so small, all of the group would become its minimum.
        out.minima[:] = np.where(scales.astype(np.float16) == 0, 0, minima)
        shift = out.minima.astype(np.float32)
        zero = 0
    out.scales[:] = scales
    kept = out.scales.astype(np.float32)
    inverse = np.divide(1, kept, out=np.zeros_like(kept), where=kept >= _SMALLEST_SCALE)
    codes = _codes((grouped - shift[..., None]) * inverse[..., None], out.grid, zero)
    out.codes[:] = codes.reshape(out.codes.shape)


def _codes(
    multiples: NDArray[np.float32], grid: WeightGrid, zero: int
) -> NDArray[np.float32] | NDArray[np.uint8]:
    """Of values in scales, the nearest codes."""
    if grid.is_fp8:
        return multiples.astype(float8_e4m3fn).view(np.uint8)  # none is beyond the largest
    return np.clip(np.rint(multiples) + zero, 0, (1 << grid.bits) - 1)
