"""Smoothing and static scales against the losses that they are to lower, in float64."""

import numpy as np
import torch

from llmbuild.plugins.common.quantised import FP8, round_to, round_to_int8
from llmbuild.quant.grid import WeightGrid
from llmbuild.quant.rtn import round_to_nearest
from llmbuild.quant.smoothquant import activation_scales, search_smoothing

GRID = WeightGrid(8, 0, True)
ROWS, COLUMNS, GROUP = 37, 96, 32


def inputs() -> torch.Tensor:
    """Heavy tails, and three channels that reach far."""
    x = np.random.default_rng(0).standard_t(4, (700, COLUMNS))
    x[:, [5, 40, 77]] *= 60
    return torch.tensor(x, dtype=torch.float32)


def weights() -> torch.Tensor:
    values = np.random.default_rng(1).standard_normal((ROWS, COLUMNS))
    return torch.tensor(values, dtype=torch.float32)


def loss(smoothing: torch.Tensor) -> float:
    """Of products with inputs in static int8 and weights in int8."""
    x, stretched = inputs() / smoothing, weights() * smoothing
    scales = torch.tensor(activation_scales(x, stretched.square().sum(0), GROUP))
    rounded = round_to_int8(x, GROUP, scales).double().numpy()
    matrix = round_to_nearest(stretched.numpy(), GRID).dequantised().astype(np.float64)
    exact = inputs().double().numpy() @ weights().double().numpy().T
    return float(np.square(rounded @ matrix.T - exact).sum())


def test_channels_that_reach_far_are_shrunk_and_products_come_nearer() -> None:
    smoothing = search_smoothing(inputs(), [(weights(), GRID)], GROUP, True)
    assert smoothing[[5, 40, 77]].min() > 3 * smoothing.median()
    assert loss(smoothing) < 0.5 * loss(torch.ones(COLUMNS))


def test_channels_stay_as_they_are_where_that_loses_least() -> None:
    """Even activations, and columns of weights from 1/16 to 16, which FP8 rounds as well as any."""
    rng = np.random.default_rng(5)
    x = rng.standard_normal((300, COLUMNS)).astype(np.float32)
    w = (rng.standard_normal((ROWS, COLUMNS)) * np.exp2(rng.uniform(-4, 4, COLUMNS))).astype("f4")
    grid = WeightGrid(8, 0, True, is_fp8=True)
    smoothing = search_smoothing(torch.tensor(x), [(torch.tensor(w), grid)], COLUMNS, True)
    assert (smoothing == 1).all()

    def error(divisors: np.ndarray) -> float:
        even, stretched = x / divisors, w * divisors
        importance = torch.tensor(np.square(stretched).sum(0))
        scales = activation_scales(torch.tensor(even), importance, COLUMNS, FP8)
        rounded = round_to(FP8, torch.tensor(even), COLUMNS, torch.tensor(scales)).double().numpy()
        matrix = round_to_nearest(stretched, grid).dequantised().astype(np.float64)
        return float(np.square(rounded @ matrix.T - x.astype(np.float64) @ w.T).sum())

    assert error(np.ones(COLUMNS, np.float32)) < error(np.sqrt(1 / np.abs(w).max(0)))


def test_static_scales_lose_no_more_than_the_whole_reach_does() -> None:
    x, importance = inputs(), torch.ones(COLUMNS)
    scales = activation_scales(x, importance, GROUP)
    assert scales.shape == (COLUMNS // GROUP,)
    assert scales.dtype == np.float32

    def error(chosen: np.ndarray) -> np.ndarray:
        rounded = round_to_int8(x, GROUP, torch.tensor(chosen)).double().numpy()
        squares = np.square(rounded - x.double().numpy())
        return squares.reshape(len(x), -1, GROUP).sum((0, 2))

    reach = x.abs().numpy().reshape(len(x), -1, GROUP).max((0, 2)) / np.float32(127)
    assert (error(scales) <= error(reach) * (1 + 1e-6)).all()
    assert (error(scales) <= error(reach * 0.8**3) * (1 + 1e-6)).all()
    assert (scales <= reach * (1 + 1e-6)).all()


def test_static_scales_of_fp8_lose_no_more_than_the_whole_reach_does() -> None:
    x = inputs()
    (scale,) = activation_scales(x, torch.ones(COLUMNS), COLUMNS, FP8)

    def error(chosen: float) -> float:
        numbers = (x / chosen).clamp(-448, 448).to(torch.float8_e4m3fn).double()
        return float((numbers * float(chosen) - x).square().sum())

    reach = float(x.abs().max()) / 448
    assert error(scale) <= error(reach) * (1 + 1e-6)
    assert scale <= reach * (1 + 1e-6)


def test_a_group_that_is_always_zero_has_a_scale_above_zero() -> None:
    x = inputs()
    x[:, :GROUP] = 0
    scales = activation_scales(x, torch.ones(COLUMNS), GROUP)
    assert np.isfinite(1 / scales).all()
    assert (scales > 0).all()
