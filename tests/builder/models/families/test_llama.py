"""Llama 2 and 3, SmolLM2, TinyLlama: held to transformers."""

from collections.abc import Callable
from typing import Any

import pytest

ROPES = {
    "default": {"rope_type": "default", "rope_theta": 1e4},
    "linear": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.5},
    "llama3": {
        "rope_type": "llama3",
        "rope_theta": 5e3,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 16,
    },
    "yarn": {
        "rope_type": "yarn",
        "rope_theta": 1e4,
        "factor": 4.0,
        "original_max_position_embeddings": 16,
    },
    "dynamic": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0},
}


@pytest.mark.parametrize("kind", ROPES)
def test_decoder_equals_transformers_past_the_original_length_for_every_rope_kind(
    hf_model: Callable[..., Any], assert_decoder_matches: Callable[..., None], kind: str
) -> None:
    length = 20 if kind == "dynamic" else 64
    saved = hf_model("llama", rope_parameters=ROPES[kind], max_position_embeddings=length)
    assert_decoder_matches(saved)


@pytest.mark.parametrize("kind", ["dynamic", "yarn"])
def test_engine_equals_transformers_past_the_original_length(
    hf_model: Callable[..., Any], assert_engine_matches: Callable[..., None], kind: str
) -> None:
    length = 20 if kind == "dynamic" else 64
    saved = hf_model("llama", rope_parameters=ROPES[kind], max_position_embeddings=length)
    assert_engine_matches(saved)
