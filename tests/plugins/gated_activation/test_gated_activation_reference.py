"""The torch reference of gated_activation against float64."""

import math

import numpy as np
import pytest
import torch

from llmbuild.plugins.gated_activation.op import ACTIVATIONS, gated_activation

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


def test_every_activation_is_of_the_gate_alone() -> None:
    assert set(ACTIVATIONS) == {"silu"}
    gate, up = torch.tensor([[1.0, 1.0]]), torch.tensor([[3.0, -3.0]])
    for name in ACTIVATIONS:
        got = gated_activation(gate, up, name)
        assert got[0, 0] == -got[0, 1] != 0
