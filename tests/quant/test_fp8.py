"""FP8 weights against OCP's table of E4M3, which the tests make themselves, and torch's casts."""

import warnings

import ml_dtypes
import numpy as np
import pytest
import torch
from e4m3 import BETWEEN, LARGEST, MAGNITUDES, NUMBERS, nearest
from numpy.typing import NDArray

from llmbuild.quant.grid import QuantisedMatrix, WeightGrid, join_rows
from llmbuild.quant.rtn import round_to_nearest

FP8 = WeightGrid(8, 0, symmetric=True, is_fp8=True)
SHAPES = [(1, 1), (3, 7), (5, 96), (17, 33)]


def random_values(rows: int, columns: int) -> NDArray[np.float32]:
    """Rows of very different magnitudes."""
    rng = np.random.default_rng(rows)
    values = rng.standard_t(3, (rows, columns)) * 10.0 ** rng.integers(-9, 9, (rows, 1))
    return values.astype(np.float32)


def test_every_byte_stands_for_ocps_number() -> None:
    codes = np.arange(256, dtype=np.uint8).reshape(1, -1)
    values = QuantisedMatrix(FP8, codes, np.ones((1, 1), np.float32)).dequantised()
    np.testing.assert_array_equal(values[0], NUMBERS)
    assert np.nanmax(values) == LARGEST
    assert np.isnan(values[0, [0x7F, 0xFF]]).all()


@pytest.mark.parametrize("power", [-30, -3, 0, 9])
def test_numbers_ties_and_their_neighbours_go_to_the_nearest_even_one(power: int) -> None:
    """Subnormal ones included; a scale that is a power of two makes all of it exact."""
    beside = [np.nextafter(BETWEEN.astype(np.float32), np.float32(to)) for to in (0, 1e9)]
    points = np.concatenate([MAGNITUDES, BETWEEN, *beside])
    points = np.concatenate([points, -points])
    values = (points * 2.0**power).astype(np.float32).reshape(1, -1)
    matrix = round_to_nearest(values, FP8)
    assert matrix.scales.item() == 2.0**power
    np.testing.assert_array_equal(matrix.codes[0], nearest(points))
    cast = torch.from_numpy(points).float().to(torch.float8_e4m3fn)
    np.testing.assert_array_equal(matrix.codes[0], cast.view(torch.uint8).numpy())


@pytest.mark.parametrize(("rows", "columns"), SHAPES)
def test_a_rows_scale_is_its_largest_over_448_and_codes_are_nearest(
    rows: int, columns: int
) -> None:
    values = random_values(rows, columns)
    matrix = round_to_nearest(values, FP8)
    assert (matrix.codes.dtype, matrix.scales.dtype) == (np.uint8, np.float32)
    largest = np.abs(values).max(1, keepdims=True)
    np.testing.assert_array_equal(matrix.scales, largest / np.float32(LARGEST))
    exact = values.astype(np.float64) / matrix.scales.astype(np.float64)
    chosen = np.abs(NUMBERS[matrix.codes] - exact)
    # A tie that float32 sees half an ulp off may fall to either side.
    assert (chosen <= np.abs(NUMBERS[nearest(exact)] - exact) + 1e-6 * np.abs(exact)).all()
    assert (np.abs(NUMBERS[matrix.codes]).max(1) == LARGEST).all()


@pytest.mark.parametrize(("rows", "columns"), SHAPES)
def test_a_weight_is_its_rows_scale_times_its_number(rows: int, columns: int) -> None:
    matrix = round_to_nearest(random_values(rows, columns), FP8)
    exact = NUMBERS[matrix.codes] * matrix.scales.astype(np.float64)  # 4 and 24 bits
    np.testing.assert_array_equal(matrix.dequantised(), exact.astype(np.float32))


def test_no_normal_weight_moves_by_more_than_a_sixteenth() -> None:
    values = random_values(17, 96)
    matrix = round_to_nearest(values, FP8)
    error = np.abs(matrix.dequantised() - values)
    least = matrix.scales * 2.0**-6  # below it steps are all the same
    assert (error <= np.maximum(np.abs(values), least) / 16 * (1 + 1e-5)).all()


@pytest.mark.parametrize("largest", [0.0, 1e-40, 1e-37], ids=str)
def test_rows_of_zeros_or_too_small_for_a_scale_become_zero(largest: float) -> None:
    values = random_values(3, 7)
    values[1] = [largest, -largest, 0, -0.0, 0, 0, largest]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        matrix = round_to_nearest(values, FP8)
    assert not matrix.dequantised()[1].any()
    assert matrix.dequantised()[[0, 2]].any(1).all()


@pytest.mark.parametrize("wrong", [np.nan, np.inf, -np.inf])
def test_a_value_that_is_no_number_shows_in_its_rows_scale(wrong: float) -> None:
    values = random_values(5, 33)
    values[3, 9] = wrong
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        scales = round_to_nearest(values, FP8).scales
    assert np.argwhere(~np.isfinite(scales)).tolist() == [[3, 0]]


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16], ids=["fp16", "bf16"])
def test_values_of_any_float_type_are_rounded_as_float32(dtype: np.dtype) -> None:
    values = np.random.default_rng(0).standard_normal((5, 33)).astype(dtype)
    stored, widened = (round_to_nearest(v, FP8) for v in (values, values.astype(np.float32)))
    np.testing.assert_array_equal(stored.codes, widened.codes)
    np.testing.assert_array_equal(stored.scales, widened.scales)


def test_parts_keep_their_values() -> None:
    matrix = round_to_nearest(random_values(5, 96), FP8)
    values = matrix.dequantised()
    joined = join_rows([matrix.take_rows(slice(3, 5)), matrix.take_rows(slice(0, 3))])
    np.testing.assert_array_equal(joined.dequantised(), values[[3, 4, 0, 1, 2]])
    np.testing.assert_array_equal(matrix.take_columns(5, 40).dequantised(), values[:, 5:40])


def test_its_grid_says_what_it_is() -> None:
    assert FP8.describe() == "fp8, one group a row"
