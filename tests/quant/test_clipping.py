"""Levels of least loss, against a search over every candidate in float64."""

import numpy as np
import pytest
import torch

from llmbuild.quant.clipping import SHRINKS, round_clipped, search_levels
from llmbuild.quant.grid import WeightGrid
from llmbuild.quant.rtn import round_to_nearest

GRIDS = [
    WeightGrid(bits, group_size, symmetric)
    for bits in (4, 8)
    for group_size in (32, 0)
    for symmetric in (True, False)
]
grids = pytest.mark.parametrize("grid", GRIDS, ids=WeightGrid.describe)


def weights(seed: int = 0) -> np.ndarray:
    """Rows of heavy tails, which clipping helps; one of zeros, one all positive."""
    rng = np.random.default_rng(seed)
    values = rng.standard_t(3, (7, 96)).astype(np.float32)
    values[3], values[5] = 0, np.abs(values[5]) + 1
    return values


def importance(seed: int = 1) -> np.ndarray:
    return np.random.default_rng(seed).uniform(0.1, 9, 96).astype(np.float32)


def error(matrix_values: np.ndarray, values: np.ndarray, weight: np.ndarray) -> np.ndarray:
    """Of each row, in float64."""
    return (np.square(matrix_values.astype(np.float64) - values) * weight).sum(1)


@grids
def test_no_shrunk_range_would_lose_less(grid: WeightGrid) -> None:
    values, weight = weights()[:, :32], importance()[:32]
    found = error(round_clipped(values, grid, torch.tensor(weight)).dequantised(), values, weight)
    last, zero = (1 << grid.bits) - 1, grid.zero
    for shrink in SHRINKS:
        if grid.symmetric:
            largest = np.abs(values).max(1)
            scales = np.stack([s * largest * shrink for s in (1 / (zero - 1), 1 / zero, -1 / zero)])
            offsets = -zero * scales.astype(np.float16).astype(np.float64)
        else:
            low, high = np.minimum(values.min(1), 0), np.maximum(values.max(1), 0)
            scales = ((high - low) * shrink / last)[None]
            offsets = (low * np.float32(shrink)).astype(np.float16).astype(np.float64)[None]
        for scale, offset in zip(
            scales.astype(np.float16).astype(np.float64), offsets, strict=True
        ):
            with np.errstate(divide="ignore", invalid="ignore"):
                codes = np.rint((values - offset[:, None]) / scale[:, None])
            codes = np.clip(np.nan_to_num(codes), 0, last)
            candidate = error(codes * scale[:, None] + offset[:, None], values, weight)
            assert (found <= candidate * (1 + 1e-4) + 1e-9).all()


@grids
def test_clipping_never_loses_more_than_rounding_to_nearest(grid: WeightGrid) -> None:
    values, weight = weights(), importance()
    clipped = error(round_clipped(values, grid, torch.tensor(weight)).dequantised(), values, weight)
    nearest = error(round_to_nearest(values, grid).dequantised(), values, weight)
    assert (clipped <= nearest * (1 + 1e-5)).all()
    if grid.bits == 4:
        assert clipped.sum() < 0.97 * nearest.sum()


def test_the_code_that_only_one_side_has_goes_to_the_larger_weight() -> None:
    values = np.linspace(-1, 8, 32, dtype=np.float32)[None]
    levels = search_levels(torch.tensor(values), WeightGrid(4, 0, True), torch.ones(32))
    assert float(levels.scales.item()) < 0


@grids
def test_rows_of_zeros_stay_zeros(grid: WeightGrid) -> None:
    matrix = round_clipped(weights(), grid, torch.tensor(importance()))
    np.testing.assert_array_equal(matrix.dequantised()[3], 0)


@grids
def test_weights_that_no_scale_reaches_have_no_number_for_one(grid: WeightGrid) -> None:
    """As rounded to nearest, so that whoever reads them is told."""
    values = weights()
    values[2, 40] = 1e12
    group = 40 // grid.columns_of(96)
    scales = round_clipped(values, grid, torch.tensor(importance())).scales
    assert np.argwhere(~np.isfinite(scales)).tolist() == [[2, group]]
