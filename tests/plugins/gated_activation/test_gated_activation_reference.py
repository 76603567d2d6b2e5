"""The torch references of activation and gated_activation against float64."""

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch

from llmbuild.plugins.gated_activation.op import ACTIVATIONS, activation, gated_activation

EPS = 2.0**-24


def silu(x: float) -> float:
    return x / (1.0 + math.exp(-x)) if x > -700 else 0.0


@pytest.mark.parametrize("rows_and_width", [(1, 1), (3, 7), (2, 53)])
def test_silu_of_the_gate_times_up(rows_and_width: tuple[int, int]) -> None:
    rng = np.random.default_rng(0)
    gate, up = (rng.normal(0, 4, rows_and_width).astype(np.float32) for _ in "ab")
    got = gated_activation(torch.from_numpy(gate), torch.from_numpy(up), "silu").numpy()
    for row, column in np.ndindex(rows_and_width):
        expected = silu(float(gate[row, column])) * float(up[row, column])
        assert abs(got[row, column] - expected) <= 8 * EPS * abs(expected)


def test_far_gates_are_closed_or_open_without_overflow() -> None:
    gate = torch.tensor([[-1e4, -200.0, 0.0, 200.0, 1e4]])
    got = gated_activation(gate, torch.full_like(gate, 2.0), "silu")
    assert got.tolist() == [[0.0, 0.0, 0.0, 400.0, 2e4]]


EXPECTED: dict[str, Callable[[float], float]] = {
    "silu": silu,
    "gelu": lambda x: x * (1 + math.erf(x / math.sqrt(2))) / 2,
    "gelu_tanh": lambda x: x * (1 + math.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))) / 2,
    "relu": lambda x: max(x, 0.0),
    "relu2": lambda x: max(x, 0.0) ** 2,
}


def test_no_activation_is_without_its_formula() -> None:
    assert set(ACTIVATIONS) == set(EXPECTED)


@pytest.mark.parametrize("kind", EXPECTED)
def test_each_activation_is_its_formula(kind: str) -> None:
    x = np.array([[-9.0, -3.0, -1.0, -0.25, -1e-4, 0.0, 1e-4], [0.25, 0.5, 1, 2, 3, 9, 50]])
    x = x.astype(np.float32)
    got = activation(torch.from_numpy(x), kind).numpy()
    assert (got.shape, got.dtype) == (x.shape, np.float32)
    for value, result in zip(x.flatten(), got.flatten(), strict=True):
        value = float(value)
        # The tails of gelu are differences of near-equal numbers: errors are relative to x.
        assert abs(float(result) - EXPECTED[kind](value)) <= 8 * EPS * max(abs(value), value**2)


@pytest.mark.parametrize("kind", EXPECTED)
def test_gated_form_is_of_the_gate_alone(kind: str) -> None:
    rng = np.random.default_rng(1)
    gate, up = (torch.from_numpy(rng.normal(0, 2, (3, 7)).astype(np.float32)) for _ in "ab")
    expected = activation(gate, kind) * up
    torch.testing.assert_close(gated_activation(gate, up, kind), expected, rtol=0, atol=0)
    torch.testing.assert_close(gated_activation(gate, -up, kind), -expected, rtol=0, atol=0)
