"""Round to nearest, against searches over the whole grid and exact bounds."""

import warnings

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray

from llmbuild.quant import grid as grid_module
from llmbuild.quant.grid import QuantisedMatrix, WeightGrid
from llmbuild.quant.rtn import round_to_nearest

GRIDS = [
    WeightGrid(bits, group_size, symmetric)
    for bits in (4, 8)
    for group_size in (32, 64, 0)
    for symmetric in (True, False)
]
grids = pytest.mark.parametrize("grid", GRIDS, ids=WeightGrid.describe)
ROWS, COLUMNS = 5, 192


def over_columns(numbers: NDArray[np.float16], columns: int) -> NDArray[np.float64]:
    """Scales or minima [rows, groups] as each column has them, in float64."""
    return np.repeat(numbers.astype(np.float64), columns // numbers.shape[1], axis=1)


def values_of_grid(matrix: QuantisedMatrix) -> NDArray[np.float64]:
    """Every value that a code could stand for: [rows, columns, codes], in float64."""
    codes = np.arange(1 << matrix.grid.bits, dtype=np.float64)
    scales = over_columns(matrix.scales, matrix.codes.shape[1])[..., None]
    if matrix.minima is None:
        return scales * (codes - 2 ** (matrix.grid.bits - 1))
    return scales * codes + over_columns(matrix.minima, matrix.codes.shape[1])[..., None]


def random_values(seed: int = 3) -> NDArray[np.float32]:
    """Rows of very different magnitudes, the last all negative, the one before all positive."""
    rng = np.random.default_rng(seed)
    values = rng.standard_normal((ROWS, COLUMNS)) * np.array([[1e-2], [1], [300], [1], [1]])
    values[3], values[4] = np.abs(values[3]) + 0.5, -np.abs(values[4]) - 0.5
    return values.astype(np.float32)


@grids
def test_each_code_is_the_nearest_of_its_grid(grid: WeightGrid) -> None:
    values = random_values()
    matrix = round_to_nearest(values, grid)
    assert matrix.grid == grid
    assert (matrix.codes.dtype, matrix.codes.shape) == (np.uint8, values.shape)
    distances = np.abs(values_of_grid(matrix) - values[..., None].astype(np.float64))
    chosen = np.take_along_axis(distances, matrix.codes[..., None].astype(np.intp), axis=2)[..., 0]
    # A tie that float32 sees half an ulp off may fall to either side.
    slack = 1e-5 * over_columns(matrix.scales, COLUMNS)
    assert (chosen <= distances.min(axis=2) + slack).all()


@grids
def test_scales_span_the_group_rounded_to_half_precision(grid: WeightGrid) -> None:
    values = random_values()
    matrix = round_to_nearest(values, grid)
    grouped = values.reshape(ROWS, -1, grid.columns_of(COLUMNS)).astype(np.float64)
    levels = 2**grid.bits - 1
    if grid.symmetric:
        assert matrix.minima is None
        exact = np.abs(grouped).max(2) / (2 ** (grid.bits - 1) - 1)
    else:
        assert matrix.minima is not None
        low, high = np.minimum(grouped.min(2), 0), np.maximum(grouped.max(2), 0)
        exact = (high - low) / levels
        np.testing.assert_allclose(matrix.minima.astype(np.float64), low, rtol=2.0**-11)
        assert (matrix.minima[3] == 0).all()  # all positive: zero is the least
    np.testing.assert_allclose(matrix.scales.astype(np.float64), exact, rtol=1.001 * 2.0**-11)


@grids
def test_no_weight_moves_by_more_than_half_a_scale(grid: WeightGrid) -> None:
    """Half precision moves scale and minimum by 2^-11 of themselves: at the ends of the grid by an
    eighth of the scale each at most, so that no value is cut to the grid by more than half."""
    values = random_values()
    matrix = round_to_nearest(values, grid)
    half = over_columns(matrix.scales, COLUMNS) / 2
    assert (np.abs(matrix.dequantised() - values) <= half * (1 + 1e-4)).all()


@grids
def test_groups_of_zeros_stay_zero(grid: WeightGrid) -> None:
    values = random_values()
    values[0], values[1, :64] = 0, -0.0
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        matrix = round_to_nearest(values, grid)
    assert (matrix.scales[0] == 0).all()
    assert not matrix.dequantised()[0].any()
    if grid.group_size:
        assert not matrix.dequantised()[1, :64].any()


@pytest.mark.parametrize("constant", [0.5, -0.5, 1e-3, -300.0])
@grids
def test_a_group_of_one_value_keeps_it_to_half_precision(grid: WeightGrid, constant: float) -> None:
    """Its one value is an end of the grid, so only the scale's or the minimum's rounding is left:
    2^-11 of itself, or half of half precision's least step, 2^-24, for each step of the grid."""
    values = np.full((3, 192), constant, np.float32)
    error = np.abs(round_to_nearest(values, grid).dequantised() - values)
    assert (error <= 1.001 * 2.0**-11 * abs(constant) + 2.0 ** (grid.bits - 25)).all()


@grids
def test_all_values_below_zero_use_the_lower_end(grid: WeightGrid) -> None:
    matrix = round_to_nearest(random_values()[4:], grid)
    grouped = matrix.codes.reshape(-1, grid.columns_of(COLUMNS))
    assert (grouped.min(1) == (1 if grid.symmetric else 0)).all()
    assert (matrix.dequantised() < 0).all() or not grid.symmetric


def test_a_symmetric_grid_leaves_its_lowest_code_unused() -> None:
    """So that it stands around zero."""
    for bits in (4, 8):
        matrix = round_to_nearest(random_values(), WeightGrid(bits, 32, True))
        assert matrix.codes.min() == 1
        assert matrix.codes.max() == 2**bits - 1


@pytest.mark.parametrize("grid", [g for g in GRIDS if g.symmetric], ids=WeightGrid.describe)
def test_values_that_are_on_a_symmetric_grid_already_are_kept(grid: WeightGrid) -> None:
    once = round_to_nearest(random_values(), grid)
    again = round_to_nearest(once.dequantised(), grid)
    np.testing.assert_array_equal(again.codes, once.codes)
    np.testing.assert_array_equal(again.scales, once.scales)


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16], ids=["fp16", "bf16"])
@grids
def test_values_of_any_float_type_are_rounded_as_float32(grid: WeightGrid, dtype: np.dtype) -> None:
    values = random_values().astype(dtype)
    stored, widened = (round_to_nearest(v, grid) for v in (values, values.astype(np.float32)))
    np.testing.assert_array_equal(stored.codes, widened.codes)
    np.testing.assert_array_equal(stored.scales, widened.scales)


@grids
def test_parts_of_any_size_give_the_same_matrix(
    grid: WeightGrid, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = round_to_nearest(random_values(), grid)
    for items in (1, COLUMNS, 2 * COLUMNS + 1, 4 * COLUMNS):
        monkeypatch.setattr(grid_module, "_PART_ITEMS", items)
        parts = round_to_nearest(random_values(), grid)
        np.testing.assert_array_equal(parts.codes, whole.codes)
        np.testing.assert_array_equal(parts.scales, whole.scales)
        if whole.minima is not None:
            np.testing.assert_array_equal(parts.minima, whole.minima)


@pytest.mark.parametrize("wrong", [np.nan, np.inf, -np.inf])
@grids
def test_a_value_that_is_no_number_shows_in_its_groups_scale_or_minimum(
    grid: WeightGrid, wrong: float
) -> None:
    values = random_values()
    values[1, 100] = wrong
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        matrix = round_to_nearest(values, grid)
    group = 100 // grid.columns_of(COLUMNS)
    finite = np.isfinite(matrix.scales)
    if matrix.minima is not None:
        finite &= np.isfinite(matrix.minima)
    assert np.argwhere(~finite).tolist() == [[1, group]]


@pytest.mark.parametrize("bits", [4, 8])
def test_a_group_too_small_for_a_scale_becomes_zero(bits: int) -> None:
    """Float16 holds the minimum here, and would make it of every weight; the scale it doesn't."""
    values = np.full((1, 64), 1e-9, np.float32)
    values[0, 3] = -3e-7
    assert np.float16(values.min()) < 0
    matrix = round_to_nearest(values, WeightGrid(bits, 32, symmetric=False))
    assert not matrix.dequantised().any()
