"""The torch references of a mixture's operations against float64 loops."""

import math

import ml_dtypes
import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from llmbuild.plugins.gated_activation.op import gated_activation
from llmbuild.plugins.moe.op import moe_combine, moe_gather, moe_linear, moe_route, moe_sort

EPS = 2.0**-24
SHAPES = [(1, 1, 1), (3, 2, 1), (5, 7, 3), (13, 4, 4), (2, 60, 8)]  # tokens, experts, top_k


def softmax(scores: list[float]) -> list[float]:
    powers = [math.exp(score - max(scores)) for score in scores]
    return [power / sum(powers) for power in powers]


def route_by_loops(
    logits: list[float], top_k: int, scoring: str, normalise: bool
) -> tuple[list[int], list[float]]:
    chosen = sorted(range(len(logits)), key=lambda expert: -logits[expert])[:top_k]
    if scoring == "softmax":
        scores = softmax(logits)
        weights = [scores[expert] for expert in chosen]
    else:
        weights = softmax([logits[expert] for expert in chosen])
    total = sum(weights) if normalise else 1.0
    return chosen, [weight / total for weight in weights]


@pytest.mark.parametrize("normalise", [False, True])
@pytest.mark.parametrize("scoring", ["softmax", "top_k_softmax"])
@pytest.mark.parametrize(("tokens", "experts", "top_k"), SHAPES)
def test_best_experts_come_first_with_their_weights(
    tokens: int, experts: int, top_k: int, scoring: str, normalise: bool
) -> None:
    rng = np.random.default_rng(experts)
    logits = (3 * rng.standard_normal((tokens, experts))).astype(np.float32)
    chosen, weights = moe_route(torch.from_numpy(logits), top_k, scoring, int(normalise))
    assert (chosen.dtype, weights.dtype) == (torch.int32, torch.float32)
    for row in range(tokens):
        expected = route_by_loops([float(v) for v in logits[row]], top_k, scoring, normalise)
        assert chosen[row].tolist() == expected[0]
        np.testing.assert_allclose(weights[row].numpy(), expected[1], rtol=64 * EPS)


def mlps(
    x: torch.Tensor,
    experts: torch.Tensor,
    weights: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
) -> torch.Tensor:
    """Each token's chosen gated MLPs, weighted and added: a mixture as models have it."""
    starts, rows_of, slot_of = moe_sort(experts, len(gate_up))
    gate, up = moe_linear(moe_gather(x, rows_of), gate_up, starts).chunk(2, dim=1)
    outputs = moe_linear(gated_activation(gate, up, "silu"), down, starts)
    return moe_combine(outputs, slot_of, weights)


def mlp_by_loops(
    x: NDArray[np.float64], gate_up: NDArray[np.float64], down: NDArray[np.float64]
) -> NDArray[np.float64]:
    size = len(gate_up) // 2
    hidden = []
    for i in range(size):
        gate, up = float(gate_up[i] @ x), float(gate_up[size + i] @ x)
        hidden.append(gate / (1 + math.exp(-gate)) * up)
    return down @ np.array(hidden)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("tokens", "experts", "top_k"), SHAPES)
def test_each_tokens_experts_are_weighted_and_added(
    tokens: int, experts: int, top_k: int, dtype: torch.dtype
) -> None:
    rng, hidden, size = np.random.default_rng(tokens), 11, 5
    x = rng.standard_normal((tokens, hidden)).astype(np.float32)
    stacks = [
        (rng.standard_normal(shape) / shape[-1] ** 0.5).astype(np.float32)
        for shape in ((experts, 2 * size, hidden), (experts, hidden, size))
    ]
    if dtype == torch.bfloat16:
        stacks = [stack.astype(ml_dtypes.bfloat16).astype(np.float32) for stack in stacks]
    chosen = np.stack([rng.permutation(experts)[:top_k] for _ in range(tokens)]).astype(np.int32)
    weights = rng.standard_normal((tokens, top_k)).astype(np.float32)
    got = mlps(
        *map(torch.from_numpy, (x, chosen, weights)),
        *(torch.from_numpy(stack).to(dtype) for stack in stacks),
    )
    gate_up, down = (stack.astype(np.float64) for stack in stacks)
    expected = np.zeros(x.shape)
    for token in range(tokens):
        for expert, weight in zip(chosen[token], weights[token], strict=True):
            result = mlp_by_loops(x[token].astype(np.float64), gate_up[expert], down[expert])
            expected[token] += float(weight) * result
    assert (got.dtype, got.shape) == (torch.float32, x.shape)
    assert np.abs(got.numpy() - expected).max() <= 256 * EPS * max(1.0, np.abs(expected).max())
