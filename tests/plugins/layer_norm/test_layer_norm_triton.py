"""The GPU kernel of layer_norm against float64, in Triton's interpreter: fp32 and fp16, and bf16
that is only read, since the interpreter rounds it wrongly."""

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from triton_harness import launch

from llmbuild.plugins.layer_norm import triton as kernels

EPS = 1e-5
WIDTHS = [1, 7, 63, 64, 65, 576]


def random_rows(rows: int, width: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    rng = np.random.default_rng([width, seed])
    return torch.from_numpy(rng.standard_normal((rows, width)) + 0.5).to(dtype)


def reference(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> NDArray[np.float64]:
    rows = x.double().numpy()
    rows = rows - rows.mean(-1, keepdims=True)
    rows = rows / np.sqrt((rows**2).mean(-1, keepdims=True) + EPS) * weight.numpy()
    return rows if bias is None else rows + bias.numpy()


def run(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, to: torch.dtype
) -> NDArray[np.float64]:
    y = torch.full(x.shape, torch.nan, dtype=to)
    launch(
        kernels.layer_norm,
        (len(x),),
        x=x,
        weight=weight,
        bias=bias,
        y=y,
        N=x.shape[1],
        EPS=EPS,
    )
    return y.double().numpy()


@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize(
    ("dtype", "to", "rtol"),
    [
        (torch.float32, torch.float32, 2e-6),
        (torch.float16, torch.float16, 2.0**-11),
        (torch.bfloat16, torch.float32, 2e-6),
    ],
)
@pytest.mark.parametrize("width", WIDTHS)
def test_rows_are_normalised_as_in_float64(
    width: int, dtype: torch.dtype, to: torch.dtype, rtol: float, has_bias: bool
) -> None:
    x, weight = random_rows(3, width, dtype), random_rows(1, width, torch.float32, 1)[0]
    bias = random_rows(1, width, torch.float32, 2)[0] if has_bias else None
    got = run(x, weight, bias, to)
    np.testing.assert_allclose(got, reference(x, weight, bias), rtol, atol=1e-6)


def test_mean_far_from_zero_costs_no_precision_but_its_own() -> None:
    x = random_rows(2, 65, torch.float32) + 1000
    got = run(x, torch.ones(65), None, torch.float32)
    np.testing.assert_allclose(got, reference(x, torch.ones(65), None), atol=1e-4)


def test_nan_stays_in_its_row() -> None:
    x = random_rows(3, 33, torch.float16)
    x[1, 5] = torch.nan
    got = run(x, torch.ones(33), torch.ones(33), torch.float32)
    assert np.isnan(got[1]).all()
    assert np.isfinite(got[[0, 2]]).all()
