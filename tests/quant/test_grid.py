"""Quantised matrices: what their codes stand for, against loops; which rows a grid fits."""

from collections.abc import Callable

import numpy as np
import pytest

from llmbuild.quant.grid import QuantisedMatrix, WeightGrid, join_rows

# (bits, group_size, symmetric, rows, columns, zero points); 0: one group a row
SHAPES = [
    (4, 32, True, 1, 32),
    (4, 32, False, 3, 96),
    (4, 64, True, 5, 192),
    (4, 0, False, 7, 160),
    (8, 0, True, 2, 96),
    (8, 32, False, 17, 64),
    (8, 96, True, 3, 96),
    (4, 32, False, 5, 96, True),
    (8, 0, False, 1, 64, True),
]
Make = Callable[..., QuantisedMatrix]


@pytest.fixture
def make() -> Make:
    """make(bits, group_size, symmetric, rows, columns, zero_points=False): random codes, scales of
    either sign."""

    def build(
        bits: int,
        group_size: int,
        symmetric: bool,
        rows: int,
        columns: int,
        zero_points: bool = False,
    ) -> QuantisedMatrix:
        rng = np.random.default_rng(rows)
        shape = (rows, columns // (group_size or columns))
        grid = WeightGrid(bits, group_size, symmetric, zero_points)
        return QuantisedMatrix(
            grid,
            rng.integers(0, 1 << bits, (rows, columns), dtype=np.uint8),
            rng.normal(0, 0.1, shape).astype(np.float16),
            rng.normal(0, 0.5, shape).astype(np.float16) if grid.has_minima else None,
            rng.integers(0, 1 << bits, shape, dtype=np.uint8) if zero_points else None,
        )

    return build


@pytest.mark.parametrize("shape", SHAPES)
def test_a_weight_is_its_groups_scale_times_its_code(make: Make, shape: tuple[int, ...]) -> None:
    bits, group_size, symmetric, rows, columns, *_ = shape
    matrix = make(*shape)
    values = matrix.dequantised()
    assert (values.dtype, values.shape, matrix.size) == (np.float32, (rows, columns), values.size)
    for row in range(rows):
        for column in range(columns):
            group = column // (group_size or columns)
            code = float(matrix.codes[row, column]) - (2 ** (bits - 1) if symmetric else 0)
            code -= 0 if matrix.zeros is None else float(matrix.zeros[row, group])
            product = np.float32(float(matrix.scales[row, group]) * code)  # exact: 11 and 8 bits
            minimum = 0 if matrix.minima is None else np.float32(matrix.minima[row, group])
            assert values[row, column] == product + minimum


@pytest.mark.parametrize("shape", SHAPES)
def test_taken_rows_have_the_values_of_those_rows(make: Make, shape: tuple[int, ...]) -> None:
    matrix = make(*shape)
    rows = shape[3]
    order = np.random.default_rng(1).permutation(rows)[: max(1, rows // 2)]
    for chosen in (order, slice(rows // 2, None)):
        taken = matrix.take_rows(chosen)
        assert taken.grid == matrix.grid
        np.testing.assert_array_equal(taken.dequantised(), matrix.dequantised()[chosen])


@pytest.mark.parametrize("grid", [(True,), (False,), (False, True)], ids=str)
def test_joined_parts_have_the_rows_of_all_in_order(make: Make, grid: tuple[bool, ...]) -> None:
    symmetric, *zero_points = grid
    parts = [make(4, 32, symmetric, rows, 96, *zero_points) for rows in (5, 1, 3)]
    joined = join_rows(parts)
    assert joined.grid == parts[0].grid
    assert (joined.minima is not None) == joined.grid.has_minima
    assert (joined.zeros is not None) == joined.grid.zero_points
    values = np.concatenate([part.dequantised() for part in parts])
    np.testing.assert_array_equal(joined.dequantised(), values)


def test_one_part_joined_is_itself(make: Make) -> None:
    matrix = make(8, 32, False, 3, 64)
    assert join_rows([matrix]) is matrix


@pytest.mark.parametrize(
    ("group_size", "width", "fits"),
    [
        *((32, width, width % 32 == 0) for width in (31, 32, 33, 48, 96)),
        *((64, width, width % 64 == 0) for width in (32, 64, 96, 576)),
        *((0, width, width % 32 == 0) for width in (1, 32, 48, 576)),
        (96, 96, True),
        (128, 64, False),
    ],
)
def test_a_grid_fits_rows_of_whole_groups_of_whole_units(
    group_size: int, width: int, fits: bool
) -> None:
    assert WeightGrid(4, group_size, True).fits(width) == fits


def test_a_grid_says_what_it_is() -> None:
    assert WeightGrid(4, 64, True).describe() == "int4, groups of 64, symmetric"
    assert WeightGrid(8, 0, False).describe() == "int8, one group a row, with minimum"
    zero_points = WeightGrid(4, 128, False, zero_points=True)
    assert zero_points.describe() == "int4, groups of 128, with zero points"
