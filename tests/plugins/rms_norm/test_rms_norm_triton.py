"""The GPU kernels of rms_norm against float64, in Triton's interpreter: fp32 and fp16, and bf16
that is only read, since the interpreter rounds it wrongly."""

import numpy as np
import pytest
import torch
from int8_groups import assert_rounded_to_int8
from numpy.typing import NDArray
from triton_harness import launch

from llmbuild.plugins.rms_norm import triton as kernels

EPS = 1e-5
WIDTHS = [1, 7, 63, 64, 65, 576]
INT8 = [(32, 32), (96, 32), (576, 64), (576, 576), (192, 96)]  # (N, columns of a group)
TOLERANCE = {torch.float32: 1e-6, torch.float16: 2.0**-11}  # relative


def random_rows(rows: int, width: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    rng = np.random.default_rng([width, seed])
    return torch.from_numpy(rng.standard_normal((rows, width))).to(dtype)


def reference(x: torch.Tensor, weight: torch.Tensor) -> NDArray[np.float64]:
    groups = x.double().numpy().reshape(len(x), -1, len(weight))
    scale = 1 / np.sqrt((groups**2).mean(-1, keepdims=True) + EPS)
    return (groups * scale * weight.numpy()).reshape(x.shape)


def run(x: torch.Tensor, weight: torch.Tensor, to: torch.dtype) -> NDArray[np.float64]:
    y = torch.full(x.shape, torch.nan, dtype=to)
    launch(
        kernels.rms_norm,
        (len(x),),
        x=x,
        weight=weight,
        y=y,
        N=x.shape[1],
        GROUP=len(weight),
        EPS=EPS,
    )
    return y.double().numpy()


def run_int8(
    x: torch.Tensor,
    weight: torch.Tensor,
    group: int,
    residual: torch.Tensor | None = None,
    static_scales: NDArray[np.float32] | None = None,
) -> tuple[NDArray[np.int8], NDArray[np.float32], torch.Tensor]:
    rows, width = x.shape
    codes = np.full((rows, width), 99, np.int8)
    scales = np.full((rows, width // group), np.nan, np.float32)
    total = torch.full_like(x, torch.nan)
    added = {} if residual is None else {"residual": residual, "total": total}
    launch(
        kernels.rms_norm_int8 if residual is None else kernels.add_rms_norm_int8,
        (rows,),
        x=x,
        weight=weight,
        static_scales=static_scales,
        codes=codes,
        scales=scales,
        N=width,
        GROUP=group,
        EPS=EPS,
        **added,
    )
    return codes, scales, total


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("width", WIDTHS)
def test_rows_are_normalised_as_in_float64(width: int, dtype: torch.dtype) -> None:
    x, weight = random_rows(3, width, dtype), random_rows(1, width, torch.float32, 1)[0]
    rtol = TOLERANCE[dtype]
    np.testing.assert_allclose(run(x, weight, dtype), reference(x, weight), rtol, atol=1e-7)


@pytest.mark.parametrize(("heads", "head_dim"), [(1, 64), (3, 64), (9, 20), (2, 7)])
def test_heads_are_normalised_one_by_one(heads: int, head_dim: int) -> None:
    x = random_rows(2, heads * head_dim, torch.bfloat16)
    weight = random_rows(1, head_dim, torch.float32, 1)[0]
    got = run(x, weight, torch.float32)
    np.testing.assert_allclose(got, reference(x, weight), rtol=1e-6, atol=0)


def test_large_and_tiny_rows_keep_their_meaning() -> None:
    x = random_rows(3, 65, torch.float32) * torch.tensor([[1e15], [1e-15], [0.0]])
    weight = torch.ones(65)
    got = run(x, weight, torch.float32)
    np.testing.assert_allclose(got, reference(x, weight), rtol=2e-6, atol=1e-30)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("width", WIDTHS)
def test_residual_is_added_and_the_unrounded_sum_is_normalised(
    width: int, dtype: torch.dtype
) -> None:
    x, residual = random_rows(3, width, dtype), random_rows(3, width, dtype, 2)
    weight = random_rows(1, width, torch.float32, 1)[0]
    total, y = torch.full_like(x, torch.nan), torch.full_like(x, torch.nan)
    launch(
        kernels.add_rms_norm,
        (3,),
        x=x,
        residual=residual,
        weight=weight,
        total=total,
        y=y,
        N=width,
        EPS=EPS,
    )
    exact = x.float() + residual.float()
    assert torch.equal(total, exact.to(dtype))
    rtol = TOLERANCE[dtype]
    np.testing.assert_allclose(y.double(), reference(exact, weight), rtol, atol=1e-7)


@pytest.mark.parametrize(("width", "group"), INT8)
def test_norms_are_rounded_to_int8_in_groups(width: int, group: int) -> None:
    x, weight = random_rows(3, width, torch.float16), random_rows(1, width, torch.float32, 1)[0]
    codes, scales, _ = run_int8(x, weight, group)
    assert_rounded_to_int8(codes, scales, reference(x, weight), tolerance=1e-6)


@pytest.mark.parametrize(("width", "group"), INT8)
def test_norms_of_a_sum_are_rounded_to_int8(width: int, group: int) -> None:
    x, residual = (random_rows(2, width, torch.float16, seed) for seed in (0, 2))
    weight = random_rows(1, width, torch.float32, 1)[0]
    codes, scales, total = run_int8(x, weight, group, residual)
    exact = x.float() + residual.float()
    assert torch.equal(total, exact.half())
    assert_rounded_to_int8(codes, scales, reference(exact, weight), tolerance=1e-6)


@pytest.mark.parametrize("with_residual", [False, True])
@pytest.mark.parametrize(("width", "group"), INT8)
def test_static_scales_are_those_of_every_row(width: int, group: int, with_residual: bool) -> None:
    x, weight = random_rows(3, width, torch.float16), random_rows(1, width, torch.float32, 1)[0]
    static = np.linspace(0.005, 0.03, width // group, dtype=np.float32)
    residual = torch.zeros_like(x) if with_residual else None
    codes, scales, _ = run_int8(x, weight, group, residual, static)
    assert (np.abs(codes) == 127).any(), "nothing was beyond the largest code"
    assert_rounded_to_int8(codes, scales, reference(x, weight), 1e-6, static)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("is_static", [True, False])
def test_what_int8_cannot_tell_becomes_nan_in_its_row_alone(bad: float, is_static: bool) -> None:
    """A NaN or an infinity makes the rest of its row's norm NaN or 0."""
    x = random_rows(2, 96, torch.float16)
    x[0, 40] = bad
    static = np.full(3, 0.02, np.float32) if is_static else None
    codes, scales, _ = run_int8(x, torch.ones(96), 32, static_scales=static)
    values = codes.reshape(2, 3, 32) * scales[..., None]
    assert np.isnan(values[0, 1]).all()
    assert np.isfinite(values[1]).all()


def test_row_of_zeros_is_zeros_in_int8() -> None:
    codes, scales, _ = run_int8(torch.zeros(1, 64), torch.ones(64), 32)
    assert not codes.any()
    assert not scales.any()
