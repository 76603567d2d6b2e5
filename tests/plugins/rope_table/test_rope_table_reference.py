"""The torch references of the rotary tables against transformers' own, and against float64."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from kernel_harness import make_step
from transformers import AutoConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from llmbuild.plugins.rope_table.op import dynamic_rope_table, rope_table, switched_rope_table

HEAD_DIM, THETA, ORIGINAL = 8, 10000.0, 16
# (computed tokens, new tokens): sequences below, at and above the original length, and across it.
SEQUENCES = [(0, 1), (9, 6), (0, 16), (15, 1), (16, 1), (10, 9), (0, 33), (70, 2)]
SHORT, LONG = [1.0, 1.25, 2.0, 3.5], [1.5, 2.0, 6.0, 9.0]


def their_frequencies(length: int, **scaling: Any) -> tuple[torch.Tensor, float]:
    """transformers' inverse frequencies for a sequence of this length, and attention factor."""
    config = AutoConfig.for_model(
        "phi3" if scaling["rope_type"] == "longrope" else "llama",
        hidden_size=2 * HEAD_DIM,
        num_attention_heads=2,
        max_position_embeddings=ORIGINAL * 4 if scaling["rope_type"] == "longrope" else ORIGINAL,
        original_max_position_embeddings=ORIGINAL,
        rope_parameters={"rope_theta": THETA, "partial_rotary_factor": 1.0} | scaling,
        pad_token_id=0,
    )
    make = ROPE_INIT_FUNCTIONS[scaling["rope_type"]]
    frequencies, factor = make(config, torch.device("cpu"), seq_len=length)
    return frequencies, float(factor)


def expected_table(step: Any, **scaling: Any) -> np.ndarray:
    parts = []
    for sequence, length in enumerate(step.kv_lengths.tolist()):
        frequencies, factor = their_frequencies(length, **scaling)
        rows = slice(step.query_start[sequence], step.query_start[sequence + 1])
        angles = torch.from_numpy(step.positions[rows]).float()[:, None] * frequencies.float()
        parts.append(torch.cat((angles.cos(), angles.sin()), dim=-1) * factor)
    return torch.cat(parts).numpy()


def arrays(step: Any) -> list[torch.Tensor]:
    return [*map(torch.from_numpy, (step.positions, step.query_start, step.kv_lengths))]


@pytest.mark.parametrize("scale", [1.0, 1.25])
def test_cosines_then_sines_of_positions_times_frequencies(scale: float) -> None:
    positions, frequencies = [0, 1, 7, 300], [1.0, 0.25, 0.003]
    got = rope_table(
        torch.tensor(positions, dtype=torch.int32), torch.tensor(frequencies), scale
    ).numpy()
    assert (got.shape, got.dtype) == ((4, 6), np.float32)
    for row, position in zip(got, positions, strict=True):
        angles = [float(np.float32(position) * np.float32(f)) for f in frequencies]
        expected = [math.cos(a) for a in angles] + [math.sin(a) for a in angles]
        np.testing.assert_allclose(row, np.array(expected) * scale, rtol=0, atol=2e-7)


def test_switched_table_is_transformers_longrope_for_every_length() -> None:
    step, _ = make_step(SEQUENCES, 4, np.random.default_rng(0))
    scaling = {
        "rope_type": "longrope",
        "short_factor": SHORT,
        "long_factor": LONG,
        "original_max_position_embeddings": ORIGINAL,
    }
    both = torch.stack([their_frequencies(n, **scaling)[0] for n in (1, ORIGINAL + 1)])
    factor = their_frequencies(1, **scaling)[1]
    got = switched_rope_table(*arrays(step), both, ORIGINAL, factor).numpy()
    expected = expected_table(step, **scaling)
    np.testing.assert_allclose(got, expected, rtol=0, atol=4e-7)
    other = switched_rope_table(*arrays(step), both.flip(0), ORIGINAL, factor).numpy()
    moving = step.positions > 0  # at position 0 all tables are alike
    assert (np.abs(other - expected)[moving].max(axis=1) > 1e-4).all()


@pytest.mark.parametrize("factor", [1.0, 2.0, 5.0])
def test_dynamic_table_is_transformers_for_every_length(factor: float) -> None:
    step, _ = make_step(SEQUENCES, 4, np.random.default_rng(0))
    got = dynamic_rope_table(
        *arrays(step),
        rotary_dim=HEAD_DIM,
        theta=THETA,
        factor=factor,
        original_length=ORIGINAL,
        scale=1.0,
    ).numpy()
    expected = expected_table(step, rope_type="dynamic", factor=factor)
    # Frequencies are fp32 numbers: an angle of 70 turns by its last bit, 4e-6.
    np.testing.assert_allclose(got, expected, rtol=0, atol=1e-5)


def test_dynamic_table_is_scaled() -> None:
    step, _ = make_step(SEQUENCES, 4, np.random.default_rng(0))
    shape = {"rotary_dim": 4, "theta": THETA, "factor": 2.0, "original_length": ORIGINAL}
    one, half = (dynamic_rope_table(*arrays(step), **shape, scale=s) for s in (1.0, 0.5))
    assert one.shape == (len(step.positions), 4)
    torch.testing.assert_close(half, 0.5 * one, rtol=0, atol=0)
