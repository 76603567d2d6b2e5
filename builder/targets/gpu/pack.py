"""Quantised matrices as the GPU kernels read them (plugins/common/weight_triton.py)."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from llmbuild.quant.grid import QuantisedMatrix, Scales, WeightGrid


@dataclass(frozen=True)
class PackedMatrix:
    """codes: uint8 [rows, columns / 2] of int4, int8 [rows, columns] of int8. scales, minima:
    float16 [rows, groups]. zeros: int8 [rows, groups]."""

    codes: NDArray[np.uint8] | NDArray[np.int8]
    scales: Scales
    minima: NDArray[np.float16] | None
    zeros: NDArray[np.int8] | None


def pack(matrix: QuantisedMatrix) -> PackedMatrix:
    is_int4 = matrix.grid.bits == 4
    return PackedMatrix(
        pack_int4(matrix.codes) if is_int4 else _signed(matrix.codes, matrix.grid),
        matrix.scales,
        matrix.minima,
        None if matrix.zeros is None else _signed(matrix.zeros, matrix.grid),
    )


def unpack(packed: PackedMatrix, grid: WeightGrid) -> QuantisedMatrix:
    """What was packed."""
    codes = packed.codes
    is_int4 = grid.bits == 4
    return QuantisedMatrix(
        grid,
        unpack_int4(codes.view(np.uint8)) if is_int4 else _unsigned(codes, grid),
        packed.scales,
        packed.minima,
        None if packed.zeros is None else _unsigned(packed.zeros, grid),
    )


def pack_int4(codes: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Two neighbouring columns a byte, the even one in the low four bits."""
    return codes[:, 0::2] | codes[:, 1::2] << np.uint8(4)


def unpack_int4(packed: NDArray[np.uint8]) -> NDArray[np.uint8]:
    codes = np.empty((packed.shape[0], 2 * packed.shape[1]), np.uint8)
    codes[:, 0::2], codes[:, 1::2] = packed & 15, packed >> 4
    return codes


def _signed(codes: NDArray[np.uint8], grid: WeightGrid) -> NDArray[np.int8]:
    """code - zero, which int8 holds."""
    return (codes.astype(np.int16) - grid.zero).astype(np.int8)


def _unsigned(codes: NDArray[np.generic], grid: WeightGrid) -> NDArray[np.uint8]:
    return (codes.astype(np.int16) + grid.zero).astype(np.uint8)
