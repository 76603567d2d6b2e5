"""The GPU kernels of gated_activation against float64, in Triton's interpreter."""

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from int8_groups import assert_rounded_to_int8
from numpy.typing import NDArray
from triton_harness import launch

from llmbuild.plugins.gated_activation import triton as kernels

DTYPES = {torch.float32: 2e-6, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}  # tolerance
SIZES = [(1, 1), (2, 63), (3, 64), (2, 65)]
INT8 = [(32, 32, 1), (96, 32, 2), (160, 32, 2), (576, 576, 1), (192, 96, 4)]  # N, group, groups


ACTIVATIONS: dict[str, Callable[[float], float]] = {
    "silu": lambda x: x / (1 + math.exp(-x)),
    "gelu": lambda x: x * (1 + math.erf(x / math.sqrt(2))) / 2,
    "gelu_tanh": lambda x: x * (1 + math.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))) / 2,
    "relu": lambda x: max(x, 0),
    "relu2": lambda x: max(x, 0) ** 2,
}


def reference(gate: torch.Tensor, up: torch.Tensor, kind: str) -> NDArray[np.float64]:
    activated = [ACTIVATIONS[kind](x) for x in gate.double().flatten().tolist()]
    return np.reshape(activated, gate.shape) * up.double().numpy()


def random_pair(rows: int, width: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    rng = np.random.default_rng(width)
    gate, up = (torch.from_numpy(rng.standard_normal((rows, width))).to(dtype) for _ in "gu")
    return gate * 3, up


def buffers(
    gate: torch.Tensor, up: torch.Tensor, is_merged: bool
) -> dict[str, torch.Tensor | None]:
    if is_merged:
        return {"gate": torch.cat([gate, up], 1), "up": None}
    return {"gate": gate, "up": up}


def run(gate: torch.Tensor, up: torch.Tensor, kind: str, is_merged: bool) -> torch.Tensor:
    rows, width = gate.shape
    y = torch.full_like(gate, torch.nan)
    launch(
        kernels.gated_activation,
        (rows, -(-width // 64)),
        **buffers(gate, up, is_merged),
        N=width,
        y=y,
        KIND=kernels.KINDS[kind],
        COLUMNS=64,
    )
    return y


def run_int8(
    gate: torch.Tensor,
    up: torch.Tensor,
    group: int,
    groups: int,
    is_merged: bool = True,
    static_scales: NDArray[np.float32] | None = None,
) -> tuple[NDArray[np.int8], NDArray[np.float32]]:
    rows, width = gate.shape
    codes = np.full((rows, width), 99, np.int8)
    scales = np.full((rows, width // group), np.nan, np.float32)
    launch(
        kernels.gated_activation_int8,
        (rows, -(-width // group // groups)),
        **buffers(gate, up, is_merged),
        static_scales=static_scales,
        N=width,
        codes=codes,
        scales=scales,
        KIND=kernels.KINDS["silu"],
        GROUP=group,
        GROUPS=groups,
    )
    return codes, scales


@pytest.mark.parametrize("is_merged", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", kernels.KINDS)
@pytest.mark.parametrize(("rows", "width"), SIZES)
def test_activation_of_the_gate_multiplies_up(
    rows: int, width: int, kind: str, dtype: torch.dtype, is_merged: bool
) -> None:
    gate, up = random_pair(rows, width, dtype)
    got = run(gate, up, kind, is_merged).double().numpy()
    np.testing.assert_allclose(got, reference(gate, up, kind), rtol=DTYPES[dtype], atol=2e-6)


@pytest.mark.parametrize("kind", kernels.KINDS)
def test_far_gates_saturate_and_nan_stays(kind: str) -> None:
    gate = torch.tensor([[-1000.0, -88.0, 0.0, 88.0, 1000.0, torch.nan]])
    got = run(gate, torch.ones_like(gate), kind, is_merged=False)[0]
    power = 2 if kind == "relu2" else 1
    assert got[:3].abs().max() < 1e-30
    torch.testing.assert_close(got[3:5], torch.tensor([88.0, 1000.0]) ** power)
    assert got[5].isnan()


@pytest.mark.parametrize("is_merged", [True, False])
@pytest.mark.parametrize(("width", "group", "groups"), INT8)
def test_results_are_rounded_to_int8_in_groups(
    width: int, group: int, groups: int, is_merged: bool
) -> None:
    gate, up = random_pair(3, width, torch.float16)
    codes, scales = run_int8(gate, up, group, groups, is_merged)
    assert_rounded_to_int8(codes, scales, reference(gate, up, "silu"), tolerance=2e-6)


def test_static_scales_are_those_of_every_row() -> None:
    gate, up = random_pair(3, 96, torch.float16)
    static = np.array([0.01, 0.02, 0.04], np.float32)
    codes, scales = run_int8(gate, up, 32, 2, static_scales=static)
    assert (np.abs(codes) == 127).any(), "nothing was beyond the largest code"
    assert_rounded_to_int8(codes, scales, reference(gate, up, "silu"), 2e-6, static)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_what_int8_cannot_tell_becomes_nan_in_its_group_alone(bad: float) -> None:
    gate, up = random_pair(2, 96, torch.float16)
    up[1, 40] = bad
    codes, scales = run_int8(gate, up, 32, 2)
    values = codes.reshape(2, 3, 32) * scales[..., None]
    is_nan = np.isnan(values).all(-1)
    np.testing.assert_array_equal(is_nan, [[False] * 3, [False, True, False]])
    assert np.isfinite(values[~is_nan]).all()


def test_static_scales_tell_an_infinity_but_no_nan() -> None:
    gate, up = random_pair(1, 64, torch.float32)
    up[0, 3], up[0, 40] = -torch.inf, torch.nan
    gate[0, 3] = 1.0
    codes, scales = run_int8(gate, up, 32, 2, static_scales=np.full(2, 0.1, np.float32))
    assert codes[0, 3] == -127
    np.testing.assert_array_equal(np.isnan(scales), [[False, True]])
