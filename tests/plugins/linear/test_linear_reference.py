"""The torch reference of linear against float64."""

import ml_dtypes
import numpy as np
import pytest
import torch

from llmbuild.plugins.linear.op import linear

EPS = 2.0**-24


@pytest.mark.parametrize("with_bias", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("rows", "n", "k"), [(1, 1, 1), (3, 7, 5), (2, 33, 120)])
def test_stored_weights_are_multiplied_in_fp32(
    rows: int, n: int, k: int, dtype: torch.dtype, with_bias: bool
) -> None:
    rng = np.random.default_rng(n)
    x, weight = (rng.standard_normal(shape).astype(np.float32) for shape in ((rows, k), (n, k)))
    bias = rng.standard_normal(n).astype(np.float32)
    if dtype == torch.bfloat16:
        weight = weight.astype(ml_dtypes.bfloat16).astype(np.float32)
    stored = torch.from_numpy(weight).to(dtype)
    got = linear(torch.from_numpy(x), stored, torch.from_numpy(bias) if with_bias else None)
    expected = x.astype(np.float64) @ weight.T.astype(np.float64) + (bias if with_bias else 0)
    assert (got.dtype, got.shape) == (torch.float32, (rows, n))
    bound = (k + 2) * EPS * (np.abs(x) @ np.abs(weight).T + np.abs(bias)).max()
    assert np.abs(got.numpy() - expected).max() <= bound
