"""Packing of quantised matrices for GPU kernels."""

from dataclasses import fields

import numpy as np
import pytest

from llmbuild.builder.targets.gpu.pack import pack, pack_int4, unpack
from llmbuild.quant.grid import QuantisedMatrix, WeightGrid

GRIDS = [
    WeightGrid(4, 32, symmetric=True),
    WeightGrid(4, 0, symmetric=False),
    WeightGrid(4, 96, symmetric=False, zero_points=True),
    WeightGrid(8, 0, symmetric=True),
    WeightGrid(8, 64, symmetric=False),
    WeightGrid(8, 32, symmetric=False, zero_points=True),
]


def random_matrix(grid: WeightGrid, rows: int, columns: int) -> QuantisedMatrix:
    rng = np.random.default_rng(rows)
    shape = (rows, columns // grid.columns_of(columns))
    codes = rng.integers(0, 1 << grid.bits, (rows, columns), np.uint8)
    scales = rng.standard_normal(shape).astype(np.float16)
    minima = rng.standard_normal(shape).astype(np.float16) if grid.has_minima else None
    zeros = rng.integers(0, 1 << grid.bits, shape, np.uint8) if grid.zero_points else None
    return QuantisedMatrix(grid, codes, scales, minima, zeros)


@pytest.mark.parametrize("rows", [1, 7, 16, 33])
@pytest.mark.parametrize("grid", GRIDS, ids=WeightGrid.describe)
def test_unpacked_is_what_was_packed(grid: WeightGrid, rows: int) -> None:
    matrix = random_matrix(grid, rows, 192)
    again = unpack(pack(matrix), grid)
    for field in fields(matrix):
        np.testing.assert_array_equal(getattr(again, field.name), getattr(matrix, field.name))


@pytest.mark.parametrize("grid", GRIDS, ids=WeightGrid.describe)
def test_packed_codes_are_contiguous_and_as_small_as_the_grid(grid: WeightGrid) -> None:
    packed = pack(random_matrix(grid, 7, 192))
    assert packed.codes.nbytes == 7 * 192 * grid.bits // 8
    assert packed.codes.flags.c_contiguous


def test_even_columns_are_in_the_low_bits() -> None:
    np.testing.assert_array_equal(pack_int4(np.array([[1, 2, 15, 0]], np.uint8)), [[0x21, 0x0F]])


def test_int8_codes_and_zero_points_are_signed() -> None:
    codes = np.array([[0, 128, 255] + [129] * 29], np.uint8)
    scales, zeros = np.ones((1, 1), np.float16), np.array([[130]], np.uint8)
    grid = WeightGrid(8, 32, symmetric=False, zero_points=True)
    packed = pack(QuantisedMatrix(grid, codes, scales, zeros=zeros))
    np.testing.assert_array_equal(packed.codes[0, :4], [-128, 0, 127, 1])
    np.testing.assert_array_equal(packed.zeros, [[2]])
