"""The torch references of rms_norm and add_rms_norm against float64 loops."""

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from llmbuild.plugins.rms_norm.op import add_rms_norm, rms_norm

EPS = 2.0**-24
SHAPES = [(1, 1, 1), (3, 7, 7), (2, 120, 120), (5, 42, 14), (1, 6, 1), (4, 4099, 4099)]


def norm_by_loops(
    x: NDArray[np.floating], weight: NDArray[np.float32], eps: float
) -> NDArray[np.float64]:
    """Each run of len(weight) neighbours of a row is a group of its own."""
    size, out = len(weight), np.zeros(x.shape)
    for row in range(x.shape[0]):
        for begin in range(0, x.shape[1], size):
            group = [float(value) for value in x[row, begin : begin + size]]
            root = (sum(value * value for value in group) / size + eps) ** 0.5
            for i, value in enumerate(group):
                out[row, begin + i] = value / root * float(weight[i])
    return out


def values(*shape: int, seed: int = 0) -> NDArray[np.float32]:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize("scale", [1.0, 1e-4, 1e4])
@pytest.mark.parametrize(("rows", "width", "group"), SHAPES)
def test_each_group_is_divided_by_its_own_root_mean_square(
    rows: int, width: int, group: int, scale: float
) -> None:
    x, weight = np.float32(scale) * values(rows, width), values(group, seed=1)
    got = rms_norm(torch.from_numpy(x), torch.from_numpy(weight), 1e-5).numpy()
    expected = norm_by_loops(x, weight, 1e-5)
    assert (got.shape, got.dtype) == (x.shape, np.float32)
    assert (np.abs(got - expected) <= 16 * EPS * np.abs(expected)).all()


def test_eps_lies_under_the_root_and_a_row_of_zeros_stays_zero() -> None:
    x = torch.tensor([[3.0, 4.0], [0.0, 0.0]])
    got = rms_norm(x, torch.tensor([1.0, 2.0]), 12.5)  # the mean square of the first row is 12.5
    torch.testing.assert_close(got, torch.tensor([[0.6, 1.6], [0.0, 0.0]]))


@pytest.mark.parametrize(("rows", "width"), [(1, 1), (3, 7), (2, 120)])
def test_fusion_returns_the_sum_and_the_norm_of_the_sum(rows: int, width: int) -> None:
    x, residual = values(rows, width), values(rows, width, seed=2)
    weight = values(width, seed=1)
    total, normed = add_rms_norm(*map(torch.from_numpy, (x, residual, weight)), 1e-3)
    np.testing.assert_array_equal(total.numpy(), x + residual)
    expected = norm_by_loops(x + residual, weight, 1e-3)
    assert (np.abs(normed.numpy() - expected) <= 16 * EPS * np.abs(expected)).all()
