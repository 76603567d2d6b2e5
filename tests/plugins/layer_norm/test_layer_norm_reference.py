"""The torch reference of layer_norm against float64 loops."""

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from llmbuild.plugins.layer_norm.op import layer_norm

EPS = 2.0**-24


def norm_by_loops(
    x: NDArray[np.float32],
    weight: NDArray[np.float32],
    bias: NDArray[np.float32] | None,
    eps: float,
) -> NDArray[np.float64]:
    out = np.zeros(x.shape)
    for row, values in enumerate(x.astype(np.float64)):
        mean = sum(values) / len(values)
        variance = sum((value - mean) ** 2 for value in values) / len(values)
        for i, value in enumerate(values):
            out[row, i] = (value - mean) / (variance + eps) ** 0.5 * float(weight[i])
            out[row, i] += 0.0 if bias is None else float(bias[i])
    return out


@pytest.mark.parametrize("with_bias", [True, False])
@pytest.mark.parametrize("offset", [0.0, 30.0])
@pytest.mark.parametrize(("rows", "width"), [(1, 1), (3, 7), (2, 120), (1, 4099)])
def test_each_row_is_centred_scaled_and_shifted(
    rows: int, width: int, offset: float, with_bias: bool
) -> None:
    rng = np.random.default_rng(width)
    x = (offset + rng.standard_normal((rows, width))).astype(np.float32)
    weight, bias = rng.standard_normal((2, width)).astype(np.float32)
    shift = bias if with_bias else None
    tensors = (torch.from_numpy(x), torch.from_numpy(weight))
    got = layer_norm(*tensors, None if shift is None else torch.from_numpy(shift), 1e-5).numpy()
    expected = norm_by_loops(x, weight, shift, 1e-5)
    assert (got.shape, got.dtype) == (x.shape, np.float32)
    # The mean, rounded in fp32, is subtracted: errors are of the offset's size.
    bound = 32 * EPS * (1 + abs(offset)) * max(1.0, np.abs(expected).max())
    assert np.abs(got - expected).max() <= bound


def test_eps_lies_under_the_root_and_an_even_row_becomes_the_bias() -> None:
    x, weight = torch.tensor([[3.0, 5.0], [7.0, 7.0]]), torch.tensor([1.0, 2.0])
    got = layer_norm(x, weight, torch.tensor([0.5, -0.5]), 3.0)  # the first row's variance is 1
    torch.testing.assert_close(got, torch.tensor([[0.0, 0.5], [0.5, -0.5]]))
