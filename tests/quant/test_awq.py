"""AWQ's stretch against the loss it is to lower, in float64."""

import numpy as np
import torch

from llmbuild.quant.awq import search_stretch
from llmbuild.quant.clipping import round_clipped
from llmbuild.quant.grid import WeightGrid
from llmbuild.quant.moments import input_moments

GRID = WeightGrid(4, 32, True)
ROWS, COLUMNS = 37, 96


def inputs(strong: float) -> torch.Tensor:
    """Rows of independent columns, three of which are so much stronger."""
    x = torch.tensor(np.random.default_rng(0).standard_normal((500, COLUMNS)), dtype=torch.float32)
    x[:, [5, 40, 77]] *= strong
    return x


def weights() -> torch.Tensor:
    values = np.random.default_rng(1).standard_normal((ROWS, COLUMNS))
    return torch.tensor(values, dtype=torch.float32)


def loss(stretch: torch.Tensor, x: torch.Tensor) -> float:
    """Squared error of the products with weights stretched, rounded and shrunk again."""
    stretched = (weights() * stretch).numpy()
    moments = input_moments(x) / stretch / stretch[:, None]
    matrix = round_clipped(stretched, GRID, moments.diagonal()).dequantised()
    error = matrix.astype(np.float64) / stretch.double().numpy() - weights().double().numpy()
    return float(np.square(x.double().numpy() @ error.T).sum())


def test_strong_channels_are_stretched_and_products_come_nearer() -> None:
    x = inputs(30)
    stretch = search_stretch([(weights(), GRID)], input_moments(x))
    strong = stretch[[5, 40, 77]].mean()
    assert strong > 2 * stretch.median()
    assert loss(stretch, x) < 0.7 * loss(torch.ones(COLUMNS), x)


def test_even_inputs_are_hardly_stretched() -> None:
    stretch = search_stretch([(weights(), GRID)], input_moments(inputs(1)))
    assert stretch.max() / stretch.min() < 1.5


def test_several_matrices_share_one_stretch_that_suits_their_sum() -> None:
    x = inputs(30)
    both = search_stretch([(weights(), GRID), (weights().flip(0), GRID)], input_moments(x))
    alone = search_stretch([(weights(), GRID)], input_moments(x))
    torch.testing.assert_close(both, alone)  # the same rows in another order


def test_inputs_that_are_always_zero_leave_finite_factors() -> None:
    x = inputs(30)
    x[:, 10:20] = 0
    stretch = search_stretch([(weights(), GRID)], input_moments(x))
    assert stretch.isfinite().all()
    assert (stretch > 0).all()
    silent = search_stretch([(weights(), GRID)], torch.zeros(COLUMNS, COLUMNS))
    torch.testing.assert_close(silent, torch.ones(COLUMNS))
