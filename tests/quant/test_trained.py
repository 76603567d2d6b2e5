"""Trained matrices, against autograd of the same formula and against rounding alone."""

import numpy as np
import pytest
import torch

from llmbuild.quant.grid import QuantisedMatrix, WeightGrid
from llmbuild.quant.rtn import round_to_nearest
from llmbuild.quant.trained import Rates, TrainedMatrix

GRIDS = [
    pytest.param(WeightGrid(4, 32, True), id="int4, symmetric"),
    pytest.param(WeightGrid(4, 32, False), id="int4, minimum"),
    pytest.param(WeightGrid(8, 0, True), id="int8, one scale a row"),
]
SHAPE = (7, 96)
RATES = Rates(positions=0.25, scales=0.01)


def rounded_and_values(grid: WeightGrid) -> tuple[QuantisedMatrix, np.ndarray]:
    values = np.random.default_rng(5).standard_normal(SHAPE).astype(np.float32)
    return round_to_nearest(values, grid), values


@pytest.mark.parametrize("grid", GRIDS)
def test_training_begins_with_the_matrix_as_it_is(grid: WeightGrid) -> None:
    matrix, _ = rounded_and_values(grid)
    trained = TrainedMatrix(matrix, RATES)
    expected = torch.from_numpy(matrix.dequantised()).bfloat16()
    assert torch.equal(trained.values(), expected)
    for ours, theirs in zip(trained.rounded().arrays, matrix.arrays, strict=True):
        assert np.array_equal(ours, theirs)


@pytest.mark.parametrize("grid", GRIDS)
def test_the_first_step_goes_against_the_gradient_that_autograd_finds(grid: WeightGrid) -> None:
    """Adam's first step has the rate as its length, whatever the gradient's is. Codes move when
    four such steps add up to a whole one; scales and minima show at once."""
    matrix, _ = rounded_and_values(grid)
    gradient = torch.randn(SHAPE, generator=torch.Generator().manual_seed(2))
    groups = (SHAPE[0], matrix.scales.shape[1], -1)
    scales = torch.from_numpy(matrix.scales.astype(np.float64))[..., None].requires_grad_()
    codes = torch.from_numpy(matrix.codes.astype(np.float64)).view(groups)
    leaves = [scales]
    if matrix.minima is None:
        values = scales * (codes - grid.zero)
    else:
        minima = torch.from_numpy(matrix.minima.astype(np.float64))[..., None].requires_grad_()
        leaves.append(minima)
        values = scales * codes + minima
    (values * gradient.double().view(groups)).sum().backward()
    trained = TrainedMatrix(matrix, RATES)
    trained.step(gradient, 1.0)
    after = trained.rounded()
    moved = after.scales.astype(np.float64) / matrix.scales.astype(np.float64) - 1
    assert scales.grad is not None
    assert moved == pytest.approx(-0.01 * np.sign(scales.grad[..., 0].numpy()), abs=1e-3)
    if matrix.minima is not None:
        assert after.minima is not None
        minima_grad = leaves[1].grad
        assert minima_grad is not None
        steps = (after.minima.astype(np.float64) - matrix.minima) / matrix.scales
        assert steps == pytest.approx(-0.25 * np.sign(minima_grad[..., 0].numpy()), abs=0.02)


@pytest.mark.parametrize("grid", GRIDS)
def test_codes_follow_the_gradient_and_stay_on_the_grid(grid: WeightGrid) -> None:
    matrix, _ = rounded_and_values(grid)
    gradient = torch.ones(SHAPE)
    gradient[:, ::2] = -1
    trained = TrainedMatrix(matrix, Rates(positions=0.25, scales=0.0))
    for _ in range(3):
        trained.step(gradient, 1.0)
    last = (1 << grid.bits) - 1
    expected = np.where(np.arange(SHAPE[1]) % 2 == 0, 1, -1) + matrix.codes.astype(np.int64)
    assert np.array_equal(trained.rounded().codes, expected.clip(0, last))


@pytest.mark.parametrize("grid", GRIDS)
def test_a_rate_of_zero_changes_nothing(grid: WeightGrid) -> None:
    matrix, _ = rounded_and_values(grid)
    trained = TrainedMatrix(matrix, RATES)
    trained.step(torch.ones(SHAPE), 0.0)
    assert torch.equal(trained.values(), TrainedMatrix(matrix, RATES).values())


@pytest.mark.parametrize("grid", GRIDS)
def test_what_is_rounded_is_what_was_trained(grid: WeightGrid) -> None:
    matrix, _ = rounded_and_values(grid)
    trained = TrainedMatrix(matrix, RATES)
    generator = torch.Generator().manual_seed(3)
    for _ in range(5):
        trained.step(torch.randn(SHAPE, generator=generator), 0.5)
    expected = torch.from_numpy(trained.rounded().dequantised()).bfloat16()
    assert torch.equal(trained.values(), expected)


@pytest.mark.parametrize("grid", GRIDS[:2])
def test_training_for_correlated_inputs_beats_rounding_to_nearest(grid: WeightGrid) -> None:
    """Where inputs are alike, errors of several columns can cancel."""
    matrix, values = rounded_and_values(grid)
    generator = torch.Generator().manual_seed(4)
    mixing = torch.randn((8, SHAPE[1]), generator=generator)
    x = torch.randn((200, 8), generator=generator) @ mixing
    wanted = x @ torch.from_numpy(values).T
    trained = TrainedMatrix(matrix, Rates(positions=0.05, scales=0.002))
    losses = []
    for index in range(60):
        leaf = trained.values().float().requires_grad_()
        loss = (x @ leaf.T - wanted).square().mean()
        loss.backward()
        losses.append(float(loss.detach()))
        assert leaf.grad is not None
        trained.step(leaf.grad, 1 - index / 60)
    assert losses[-1] < 0.6 * losses[0]
