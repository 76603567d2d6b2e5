"""The torch reference of quantised_linear against float64 sums over the whole numbers."""

import e4m3
import numpy as np
import pytest
import torch
from int8_rows import quantise, quantise_static

from llmbuild.plugins.linear.op import linear, quantised_linear

EPS = 2.0**-24


@pytest.mark.parametrize("activation_group", [0, 32, 96])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize(("rows", "n", "k", "group"), [(1, 1, 96, 96), (3, 7, 96, 32)])
def test_whole_numbers_are_multiplied_and_scaled(
    rows: int, n: int, k: int, group: int, bits: int, symmetric: bool, activation_group: int
) -> None:
    rng = np.random.default_rng(n + bits)
    x = rng.standard_normal((rows, k)).astype(np.float32)
    codes = rng.integers(0, 1 << bits, (n, k), dtype=np.uint8)
    scales, minima = (rng.normal(0, 0.1, (n, k // group)).astype(np.float16) for _ in "ab")
    bias = rng.standard_normal(n).astype(np.float32)
    zero = 1 << (bits - 1) if symmetric else 0
    for with_bias in (True, False):
        got = quantised_linear(
            *map(torch.from_numpy, (x, codes, scales)),
            None if symmetric else torch.from_numpy(minima),
            torch.from_numpy(bias) if with_bias else None,
            zero,
            activation_group,
        )
        assert (got.dtype, tuple(got.shape)) == (torch.float32, (rows, n))
        weight = (codes.astype(np.float64) - zero) * np.repeat(scales.astype(np.float64), group, 1)
        if not symmetric:
            weight += np.repeat(minima.astype(np.float64), group, 1)
        inputs = x.astype(np.float64)
        if activation_group:
            whole, steps = quantise(x, activation_group)
            inputs = whole * np.repeat(steps.astype(np.float64), activation_group, 1)
        expected = inputs @ weight.T + (bias if with_bias else 0)
        bound = (k + 4) * EPS * (np.abs(inputs) @ np.abs(weight).T + np.abs(bias)).max()
        assert np.abs(got.numpy() - expected).max() <= bound


def test_weights_with_zero_points_stand_around_their_groups_own() -> None:
    rng = np.random.default_rng(0)
    x = rng.standard_normal((3, 64)).astype(np.float32)
    codes, zeros = (rng.integers(0, 256, shape, dtype=np.uint8) for shape in ((5, 64), (5, 2)))
    scales = rng.normal(0, 0.1, (5, 2)).astype(np.float16)
    tensors = map(torch.from_numpy, (x, codes, scales))
    got = quantised_linear(*tensors, None, None, 0, 0, torch.from_numpy(zeros))
    weight = codes.astype(np.float64) - np.repeat(zeros.astype(np.float64), 32, 1)
    weight *= np.repeat(scales.astype(np.float64), 32, 1)
    bound = 70 * EPS * (np.abs(x) @ np.abs(weight).T)
    assert (np.abs(got.numpy() - x @ weight.T) <= bound).all()


def test_rounded_activations_differ_from_those_as_they_are() -> None:
    """By about 1 / 254 of the largest, so the attribute isn't ignored."""
    rng = np.random.default_rng(0)
    x = torch.from_numpy(rng.standard_normal((2, 64)).astype(np.float32))
    codes = torch.from_numpy(rng.integers(0, 16, (3, 64), dtype=np.uint8))
    scales = torch.ones(3, 2, dtype=torch.float16)
    plain = linear(x, codes.float() - 8, None)
    as_it_is = quantised_linear(x, codes, scales, None, None, 8, 0)
    rounded = quantised_linear(x, codes, scales, None, None, 8, 32)
    torch.testing.assert_close(as_it_is, plain, rtol=0, atol=1e-4)
    assert 1e-3 < (rounded - plain).abs().max() < 1


def test_static_scales_round_activations_of_all_rows_alike() -> None:
    rng = np.random.default_rng(0)
    x = rng.standard_normal((3, 96)).astype(np.float32)
    codes = rng.integers(0, 256, (5, 96), dtype=np.uint8)
    scales = rng.normal(0, 0.1, (5, 1)).astype(np.float16)
    given = np.array([0.01, 0.02, 0.005], np.float32)
    tensors = map(torch.from_numpy, (x, codes, scales))
    got = quantised_linear(*tensors, None, None, 128, 32, None, torch.from_numpy(given))
    whole, _ = quantise_static(x, given)
    inputs = whole * np.repeat(given.astype(np.float64), 32)
    weight = (codes.astype(np.float64) - 128) * scales.astype(np.float64)
    bound = 100 * EPS * (np.abs(inputs) @ np.abs(weight).T).max()
    assert np.abs(got.numpy() - inputs @ weight.T).max() <= bound
    assert (np.abs(whole) == 127).any()


@pytest.mark.parametrize("static", [0.004, None])
@pytest.mark.parametrize(("rows", "n", "k"), [(1, 1, 96), (3, 7, 33)])
def test_fp8_codes_meet_inputs_rounded_to_fp8(
    rows: int, n: int, k: int, static: float | None
) -> None:
    """By one scale: a static one, which some inputs exceed, or the row's; or they stay."""
    rng = np.random.default_rng(n)
    x = rng.standard_normal((rows, k)).astype(np.float32)
    codes = rng.integers(0, 127, (n, k), dtype=np.uint8) | rng.integers(0, 2, (n, k), np.uint8) << 7
    scales = rng.uniform(1e-4, 1e-3, (n, 1)).astype(np.float32)
    weight = e4m3.NUMBERS[codes] * scales.astype(np.float64)
    steps = np.full((rows, 1), static) if static else np.abs(x).max(1, keepdims=True) / 448.0
    rounded = e4m3.NUMBERS[e4m3.nearest(x / steps.astype(np.float64))] * steps
    assert not static or (np.abs(x) > 448 * static).any()
    for group, inputs in ((k, rounded), (0, x.astype(np.float64))):
        got = quantised_linear(
            torch.from_numpy(x),
            torch.from_numpy(codes).view(torch.float8_e4m3fn),
            torch.from_numpy(scales),
            *(None, None, 0, group, None),
            torch.tensor([static]) if static and group else None,
        )
        bound = (k + 8) * EPS * (np.abs(inputs) @ np.abs(weight).T)
        assert (np.abs(got.numpy() - inputs @ weight.T) <= bound).all()
