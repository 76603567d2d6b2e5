"""Quantised matrices as the CPU kernels read them (plugins/common/grid.h).

Tiles of 16 rows, in each the groups of columns in order. Of a group: vectors of 64 code bytes, four
of each row, then 16 fp16 scales and, unless symmetric, 16 minima or zero points, fp16 as well.
"""

from collections.abc import Iterator
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from llmbuild.quant.grid import QuantisedMatrix, Scales, WeightGrid

T = TypeVar("T", bound=np.generic)

TILE_ROWS = 16
PART_BYTES = 4 << 20


def quantised_bytes(grid: WeightGrid, rows: int, columns: int) -> int:
    """Bytes of a packed matrix, missing rows of its last tile included: a multiple of 32."""
    groups = columns // grid.columns_of(columns)
    records = 1 if grid.symmetric else 2
    return -(-rows // TILE_ROWS) * TILE_ROWS * (columns * grid.bits // 8 + 2 * records * groups)


def pack_quantised(matrix: QuantisedMatrix) -> Iterator[NDArray[np.uint8]]:
    """The packed matrix in parts of whole tiles, so that no second whole exists; of a stack, one
    matrix after the other."""
    *stack, rows, columns = matrix.shape
    part_rows = max(1, PART_BYTES // (TILE_ROWS * columns)) * TILE_ROWS
    for index in np.ndindex(*stack):
        for begin in range(0, rows, part_rows):
            part = matrix.take_rows((*index, slice(begin, begin + part_rows)))
            numbers = (part.scales, part.minima, part.zeros)
            fields = [_code_bytes(part), *(_number_bytes(n) for n in numbers if n is not None)]
            yield np.concatenate(fields, axis=2).reshape(-1)


def _code_bytes(matrix: QuantisedMatrix) -> NDArray[np.uint8]:
    """Code bytes [tiles, groups, bytes]. Two codes of 4 bits in a byte are four columns apart."""
    groups = matrix.scales.shape[1]
    codes = _padded(matrix.codes)
    if matrix.grid.bits == 4:
        halves = codes.reshape(len(codes), -1, 2, 4)
        codes = halves[:, :, 0] | halves[:, :, 1] << np.uint8(4)
    tiles = len(codes) // TILE_ROWS
    vectors = codes.reshape(tiles, TILE_ROWS, groups, -1, 4).transpose(0, 2, 3, 1, 4)
    return vectors.reshape(tiles, groups, -1)


def _number_bytes(numbers: Scales | NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Scales, minima or zero points [rows, groups] as bytes of fp16 [tiles, groups, 32]."""
    padded = _padded(numbers.astype("<f2"))
    tiled = padded.reshape(-1, TILE_ROWS, numbers.shape[1]).transpose(0, 2, 1)
    return np.ascontiguousarray(tiled).view(np.uint8)


def _padded(values: NDArray[T]) -> NDArray[T]:
    """With zero rows up to a whole tile."""
    missing = -len(values) % TILE_ROWS
    return np.pad(values, ((0, missing), (0, 0))) if missing else values
