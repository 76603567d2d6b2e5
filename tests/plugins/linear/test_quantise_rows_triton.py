"""The GPU kernels that round activations for a linear, in Triton's interpreter."""

import numpy as np
import pytest
import torch
from int8_groups import assert_rounded_to_int8
from numpy.typing import NDArray
from triton_harness import launch

from llmbuild.plugins.common.quantised import round_to_int8
from llmbuild.plugins.linear.quantise_rows_triton import quantise_rows, quantise_rows_e4m3


def random_rows(rows: int, columns: int, dtype: torch.dtype) -> torch.Tensor:
    rng = np.random.default_rng(columns)
    return torch.from_numpy(rng.standard_normal((rows, columns))).to(dtype)


def run_int8(
    x: torch.Tensor, group: int, groups: int, static_scales: NDArray[np.float32] | None = None
) -> tuple[NDArray[np.int8], NDArray[np.float32]]:
    rows, columns = x.shape
    codes = np.full((rows, columns), 99, np.int8)
    scales = np.full((rows, columns // group), np.nan, np.float32)
    launch(
        quantise_rows,
        (rows, -(-columns // group // groups)),
        x=x,
        static_scales=static_scales,
        N=columns,
        codes=codes,
        scales=scales,
        GROUP=group,
        GROUPS=groups,
    )
    return codes, scales


def run_e4m3(x: torch.Tensor) -> tuple[NDArray[np.float64], NDArray[np.float32]]:
    codes = torch.full(x.shape, 99, dtype=torch.uint8)
    scales = np.zeros(len(x), np.float32)
    launch(quantise_rows_e4m3, (len(x),), x=x, codes=codes, scales=scales, N=x.shape[1])
    return codes.view(torch.float8_e4m3fn).double().numpy(), scales


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    ("columns", "group", "groups"),
    [(32, 32, 1), (96, 32, 2), (192, 96, 2), (576, 64, 16), (576, 576, 1)],
)
def test_rows_are_rounded_to_int8_in_groups(
    columns: int, group: int, groups: int, dtype: torch.dtype
) -> None:
    x = random_rows(3, columns, dtype)
    codes, scales = run_int8(x, group, groups)
    assert_rounded_to_int8(codes, scales, x.double().numpy(), tolerance=2.0**-23)


@pytest.mark.parametrize("group", [32, 96])
def test_static_scales_give_what_the_reference_gives(group: int) -> None:
    x = random_rows(3, 192, torch.float32)
    x[0, 0], x[1, 1] = torch.inf, -torch.inf
    static = np.linspace(0.005, 0.02, 192 // group, dtype=np.float32)
    codes, scales = run_int8(x, group, 1, static)
    got = codes.reshape(*scales.shape, -1) * scales[..., None]
    expected = round_to_int8(x, group, torch.from_numpy(static))
    np.testing.assert_array_equal(got.reshape(x.shape), expected.numpy())


@pytest.mark.parametrize("columns", [1, 63, 64, 65, 576])
def test_rows_are_rounded_to_e4m3(columns: int) -> None:
    x = random_rows(3, columns, torch.float16)
    numbers, scales = run_e4m3(x)
    exact = x.double().numpy()
    largest = np.abs(exact).max(1)
    np.testing.assert_allclose(scales, largest / 448, rtol=2.0**-23)
    np.testing.assert_array_equal(np.abs(numbers).max(1), 448)
    # Half of the last bit: of a normal number's four, of a subnormal's 2**-9.
    steps = exact / scales[:, None]
    allowed = np.maximum(np.abs(steps) * 2.0**-4, 2.0**-10)
    assert (np.abs(numbers - steps) <= allowed * (1 + 1e-5)).all()


def test_rows_that_e4m3_cannot_tell_have_a_nan_for_a_scale() -> None:
    x = random_rows(4, 33, torch.float32)
    x[0, 5], x[1, 6], x[2] = torch.nan, torch.inf, 0.0
    numbers, scales = run_e4m3(x)
    np.testing.assert_array_equal(np.isnan(scales), [True, True, False, False])
    assert scales[2] == 0
    assert not numbers[2].any()
    assert np.isfinite(numbers).all()
