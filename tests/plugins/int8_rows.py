"""Rows of int8 activations (plugins/common/int8_rows.h) in numpy."""

import numpy as np
from numpy.typing import NDArray

SUM_COLUMNS = 32


def quantise(x: NDArray[np.float32], group: int) -> tuple[NDArray[np.int8], NDArray[np.float32]]:
    """Codes [rows, columns] and scales [rows, columns / group] of finite x."""
    grouped = x.reshape(len(x), x.shape[1] // group, group)
    largest = np.abs(grouped).max(axis=2)
    with np.errstate(divide="ignore", over="ignore"):
        inverse = np.float32(127) / largest
    inverse[~np.isfinite(inverse)] = 0
    codes = np.rint(grouped * inverse[..., None]).astype(np.int8)
    return codes.reshape(x.shape), largest / np.float32(127)


def quantise_static(
    x: NDArray[np.float32], scales: NDArray[np.float32]
) -> tuple[NDArray[np.int8], NDArray[np.float32]]:
    """Codes and scales of x without NaN, whose rows all have `scales` [columns / group]."""
    inverse = np.repeat(np.float32(1) / scales, x.shape[1] // len(scales))
    codes = np.clip(np.rint(x * inverse), -127, 127).astype(np.int8)
    return codes, np.tile(scales, (len(x), 1))


def encode(codes: NDArray[np.int8], scales: NDArray[np.float32]) -> NDArray[np.uint8]:
    """The bytes of the rows, padding zero: codes, scales, negated sums, scaled sums."""
    rows, columns = codes.shape
    sums = codes.reshape(rows, columns // SUM_COLUMNS, SUM_COLUMNS).sum(axis=2, dtype=np.int32)
    scale_of_sum = np.repeat(scales, sums.shape[1] // scales.shape[1], axis=1)
    scaled_sums = scale_of_sum * sums.astype(np.float32)
    fields = (codes, scales.astype(np.float32), -sums, scaled_sums)
    row = np.concatenate([field.view(np.uint8) for field in fields], axis=1)
    return np.pad(row, ((0, 0), (0, -row.shape[1] % 64)))
