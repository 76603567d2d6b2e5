"""GPTQ against the paper's own procedure, column by column in float64."""

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from llmbuild.quant import grid as grid_module
from llmbuild.quant.clipping import round_clipped, search_levels
from llmbuild.quant.gptq import gptq
from llmbuild.quant.grid import WeightGrid
from llmbuild.quant.moments import DAMPING, FactoredMoments, input_moments

GRIDS = [
    WeightGrid(bits, group_size, symmetric)
    for bits in (4, 8)
    for group_size in (32, 0)
    for symmetric in (True, False)
]
grids = pytest.mark.parametrize("grid", GRIDS, ids=WeightGrid.describe)
ROWS, COLUMNS = 5, 160  # more columns than a block of GPTQ, and no multiple of it


def correlated_inputs(seed: int = 0) -> torch.Tensor:
    rng = np.random.default_rng(seed)
    mixing = rng.standard_normal((COLUMNS, COLUMNS)) / np.sqrt(COLUMNS)
    x = rng.standard_normal((600, COLUMNS)) @ (np.eye(COLUMNS) + 2 * mixing)
    return torch.tensor(x * rng.uniform(0.2, 3, COLUMNS), dtype=torch.float32)


def weights(seed: int = 1) -> NDArray[np.float32]:
    return np.random.default_rng(seed).standard_normal((ROWS, COLUMNS)).astype(np.float32)


def of_paper(
    values: NDArray[np.float32], moments: torch.Tensor, grid: WeightGrid
) -> NDArray[np.float64]:
    """Optimal brain quantisation with a fixed order: after each column the inverse Hessian of the
    columns that are left is found anew, as OBQ's equations say, without any factorisation."""
    levels = search_levels(torch.tensor(values), grid, moments.diagonal())
    width = grid.columns_of(COLUMNS)
    scales, offsets = (
        np.repeat(t[..., 0].double().numpy(), width, 1) for t in (levels.scales, levels.offsets)
    )
    hessian = moments.double().numpy()
    hessian = hessian + np.eye(COLUMNS) * DAMPING * hessian.diagonal().mean()
    left, result = values.astype(np.float64), np.empty(values.shape)
    order = list(np.argsort(-moments.diagonal().numpy(), kind="stable"))
    while order:
        inverse = np.linalg.inv(hessian[np.ix_(order, order)])
        column = order[0]
        codes = np.rint((left[:, column] - offsets[:, column]) / scales[:, column])
        codes = np.clip(codes, 0, (1 << grid.bits) - 1)
        result[:, column] = codes * scales[:, column] + offsets[:, column]
        error = (left[:, column] - result[:, column]) / inverse[0, 0]
        left[:, order] -= error[:, None] * inverse[0]
        order = order[1:]
    return result


@grids
def test_codes_are_those_of_the_paper(grid: WeightGrid) -> None:
    moments = input_moments(correlated_inputs())
    got = gptq(weights(), FactoredMoments.of(moments), grid).dequantised()
    expected = of_paper(weights(), moments, grid)
    # A tie that float32 decides the other way changes what follows in its row.
    agreeing = (np.abs(got - expected) < 1e-4).mean()
    assert agreeing > (0.97 if grid.bits == 4 else 0.9)


@grids
def test_products_are_nearer_than_with_each_weight_rounded_alone(grid: WeightGrid) -> None:
    x, values = correlated_inputs().double().numpy(), weights()
    moments = input_moments(correlated_inputs())
    compensated = gptq(values, FactoredMoments.of(moments), grid).dequantised()
    alone = round_clipped(values, grid, moments.diagonal()).dequantised()
    lost = [np.square(x @ (each - values).T).sum() for each in (compensated, alone)]
    assert lost[0] < 0.6 * lost[1]


@grids
def test_uncorrelated_inputs_leave_nothing_to_make_up_for(grid: WeightGrid) -> None:
    moments = torch.diag(torch.linspace(3, 1, COLUMNS))
    got = gptq(weights(), FactoredMoments.of(moments), grid)
    alone = round_clipped(weights(), grid, moments.diagonal())
    np.testing.assert_array_equal(got.codes, alone.codes)


@grids
def test_parts_of_any_size_give_the_same_matrix(
    grid: WeightGrid, monkeypatch: pytest.MonkeyPatch
) -> None:
    moments = FactoredMoments.of(input_moments(correlated_inputs()))
    whole = gptq(weights(), moments, grid)
    monkeypatch.setattr(grid_module, "_PART_ITEMS", 2 * COLUMNS + 1)
    parts = gptq(weights(), moments, grid)
    agreeing = (parts.codes == whole.codes).mean()
    assert agreeing > 0.99
    np.testing.assert_array_equal(parts.scales, whole.scales)


def test_inputs_that_are_always_zero_are_no_trouble() -> None:
    x = correlated_inputs()
    x[:, 40:60] = 0
    matrix = gptq(weights(), FactoredMoments.of(input_moments(x)), WeightGrid(4, 32, True))
    assert np.isfinite(matrix.dequantised()).all()
    silence = FactoredMoments.of(torch.zeros(COLUMNS, COLUMNS))
    silent = gptq(weights(), silence, WeightGrid(4, 32, True))
    assert np.isfinite(silent.dequantised()).all()
