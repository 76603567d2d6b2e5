"""Packed quantised matrices against the layout written out by loops."""

import tracemalloc

import numpy as np
import pytest
from numpy.typing import NDArray

from llmbuild.builder.targets.cpu import pack_quantised as module
from llmbuild.builder.targets.cpu.pack_quantised import pack_quantised, quantised_bytes
from llmbuild.quant.grid import QuantisedMatrix, WeightGrid

GRIDS = [WeightGrid(b, g, s) for b in (4, 8) for g in (32, 64, 192, 0) for s in (True, False)]
GRIDS += [WeightGrid(4, 64, False, zero_points=True), WeightGrid(8, 0, False, zero_points=True)]


def matrix_of(grid: WeightGrid, rows: int, columns: int) -> QuantisedMatrix:
    rng = np.random.default_rng(rows)
    groups = (rows, columns // grid.columns_of(columns))
    codes = rng.integers(0, 1 << grid.bits, (rows, columns), dtype=np.uint8)
    scales, minima = rng.standard_normal((2, *groups)).astype(np.float16)
    zeros = rng.integers(0, 1 << grid.bits, groups, dtype=np.uint8)
    return QuantisedMatrix(
        grid,
        codes,
        scales,
        minima if grid.has_minima else None,
        zeros if grid.zero_points else None,
    )


def packed(matrix: QuantisedMatrix) -> NDArray[np.uint8]:
    return np.concatenate(list(pack_quantised(matrix)))


def packed_by_loops(matrix: QuantisedMatrix) -> bytes:
    rows, columns = matrix.codes.shape
    width = matrix.grid.columns_of(columns)

    def code(row: int, column: int) -> int:
        return int(matrix.codes[row, column]) if row < rows else 0

    def number(field: NDArray[np.generic], row: int, group: int) -> bytes:
        return np.array(field[row, group], "<f2").tobytes() if row < rows else bytes(2)

    data = bytearray()
    for tile in range(0, rows, 16):
        lanes = range(tile, tile + 16)
        for group in range(columns // width):
            if matrix.grid.bits == 8:
                for k in range(group * width, (group + 1) * width, 4):
                    data += bytes(code(row, k + j) for row in lanes for j in range(4))
            else:
                for k in range(group * width, (group + 1) * width, 8):
                    data += bytes(
                        code(row, k + j) | code(row, k + 4 + j) << 4
                        for row in lanes
                        for j in range(4)
                    )
            for field in (matrix.scales, matrix.minima, matrix.zeros):
                if field is not None:
                    data += b"".join(number(field, row, group) for row in lanes)
    return bytes(data)


@pytest.mark.parametrize("grid", GRIDS, ids=WeightGrid.describe)
@pytest.mark.parametrize("rows", [1, 15, 16, 17, 49])
def test_bytes_are_those_of_a_loop_and_padding_is_zero(rows: int, grid: WeightGrid) -> None:
    matrix = matrix_of(grid, rows, 192)
    got = packed(matrix)
    assert got.tobytes() == packed_by_loops(matrix)
    assert len(got) == quantised_bytes(grid, rows, 192)
    assert quantised_bytes(grid, rows, 192) % 32 == 0


def test_parts_join_where_they_meet(monkeypatch: pytest.MonkeyPatch) -> None:
    matrix = matrix_of(WeightGrid(4, 32, False), 100, 64)
    whole = packed_by_loops(matrix)
    for part_bytes, count in ((1, 7), (3 * 16 * 64, 3), (1 << 20, 1)):
        monkeypatch.setattr(module, "PART_BYTES", part_bytes)
        parts = list(pack_quantised(matrix))
        assert b"".join(part.tobytes() for part in parts) == whole
        assert len(parts) == count


def test_packing_holds_parts_and_not_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PART_BYTES", 1 << 18)
    matrix = matrix_of(WeightGrid(8, 32, True), 16384, 512)
    tracemalloc.start()
    try:
        for _ in pack_quantised(matrix):
            pass
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 6 * module.PART_BYTES < matrix.codes.nbytes / 5
