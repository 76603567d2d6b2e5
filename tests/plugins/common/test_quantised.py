"""What quantised operands stand for in torch, against loops and numpy."""

import numpy as np
import pytest
import torch
from int8_rows import quantise, quantise_static

from llmbuild.plugins.common.quantised import dequantise, round_to_int8


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize(("rows", "columns", "groups"), [(1, 32, 1), (3, 96, 3), (5, 192, 2)])
@pytest.mark.parametrize("zero", [8, 128])
def test_a_weight_is_its_groups_scale_times_the_code_beyond_zero(
    rows: int, columns: int, groups: int, symmetric: bool, zero: int
) -> None:
    rng = np.random.default_rng(rows)
    codes = rng.integers(0, 2 * zero, (rows, columns), dtype=np.uint8)
    scales, minima = (rng.normal(0, 0.1, (rows, groups)).astype(np.float16) for _ in "ab")
    arguments = (torch.from_numpy(codes), torch.from_numpy(scales))
    given = torch.from_numpy(minima)
    got = dequantise(*arguments, None, zero) if symmetric else dequantise(*arguments, given, 0)
    assert (got.dtype, tuple(got.shape)) == (torch.float32, (rows, columns))
    for row in range(rows):
        for column in range(columns):
            group = column // (columns // groups)
            code = int(codes[row, column]) - (zero if symmetric else 0)
            product = np.float32(float(scales[row, group]) * code)  # exact: 11 and 8 bits
            expected = product + (0 if symmetric else np.float32(minima[row, group]))
            assert got[row, column] == expected


def test_zeros_take_the_place_of_the_one_zero_group_by_group() -> None:
    rng = np.random.default_rng(0)
    codes, zeros = (rng.integers(0, 16, shape, dtype=np.uint8) for shape in ((3, 96), (3, 3)))
    scales = rng.normal(0, 0.1, (3, 3)).astype(np.float16)
    got = dequantise(*map(torch.from_numpy, (codes, scales)), None, 0, torch.from_numpy(zeros))
    for row in range(3):
        for column in range(96):
            code = int(codes[row, column]) - int(zeros[row, column // 32])
            assert got[row, column] == np.float32(float(scales[row, column // 32]) * code)


@pytest.mark.parametrize(("rows", "columns", "group"), [(0, 32, 32), (1, 32, 32), (7, 192, 64)])
def test_activations_become_multiples_of_their_groups_step(
    rows: int, columns: int, group: int
) -> None:
    x = np.random.default_rng(columns).standard_normal((rows, columns)).astype(np.float32) * 50
    codes, scales = quantise(x, group)
    expected = codes.astype(np.float32) * np.repeat(scales, group, axis=1)
    got = round_to_int8(torch.from_numpy(x), group)
    np.testing.assert_array_equal(got.numpy(), expected)
    assert (np.abs(codes).reshape(rows, columns // group, group).max(2, initial=0) == 127).all()


def test_halves_are_rounded_to_even() -> None:
    x = torch.tensor([[127, 0.5, 1.5, 2.5, -0.5, -1.5, -2.5, 126.5] * 4])
    expected = [[127, 0, 2, 2, 0, -2, -2, 126] * 4]
    assert round_to_int8(x, 32).tolist() == expected


@pytest.mark.parametrize("small", [0.0, -0.0, 1e-40, 3.7e-37])
def test_a_group_of_zeros_or_of_almost_nothing_is_zero(small: float) -> None:
    x = torch.ones(1, 96)
    x[0, 32:64] = small
    got = round_to_int8(x, 32)
    assert not got[0, 32:64].any()
    assert (got[0, :32] == got[0, 64:]).all()
    assert abs(got[0, 0] - 1) < 1e-6


@pytest.mark.parametrize("wrong", [torch.nan, torch.inf, -torch.inf])
def test_what_is_no_number_makes_its_group_none_and_no_other(wrong: float) -> None:
    x = torch.ones(1, 96)
    x[0, 40] = wrong
    finite = round_to_int8(x, 32).isfinite()
    assert not finite[0, 32:64].any()
    assert finite[0, :32].all()
    assert finite[0, 64:].all()


@pytest.mark.parametrize(("rows", "columns", "group"), [(0, 32, 32), (1, 32, 32), (7, 192, 64)])
def test_static_scales_are_those_of_every_row(rows: int, columns: int, group: int) -> None:
    rng = np.random.default_rng(columns)
    x = rng.standard_normal((rows, columns)).astype(np.float32) * 3
    scales = rng.uniform(0.01, 0.1, columns // group).astype(np.float32)
    codes, _ = quantise_static(x, scales)
    got = round_to_int8(torch.from_numpy(x), group, torch.from_numpy(scales))
    expected = codes.astype(np.float32) * np.repeat(scales, group)
    np.testing.assert_array_equal(got.numpy(), expected)
    for row in range(rows):
        alone = round_to_int8(torch.from_numpy(x[row : row + 1]), group, torch.from_numpy(scales))
        np.testing.assert_array_equal(alone.numpy(), expected[row : row + 1])


def test_static_scales_round_halves_to_even_saturate_and_leave_a_nan() -> None:
    given = [0.25, 0.75, -0.25, -1.25, 63.4, 64, -64, 1e30, torch.inf, -torch.inf, torch.nan]
    expected = [0.0, 1, 0, -1, 63.5, 63.5, -63.5, 63.5, 63.5, -63.5, torch.nan]
    x = torch.zeros(1, 64)
    x[0, 20 : 20 + len(given)] = torch.tensor(given)
    got = round_to_int8(x, 32, torch.tensor([0.5, 3.0]))[0, 20 : 20 + len(given)]
    torch.testing.assert_close(got, torch.tensor(expected), rtol=0, atol=0, equal_nan=True)
