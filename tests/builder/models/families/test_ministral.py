"""Ministral 8B: held to transformers."""

from collections.abc import Callable
from typing import Any

import pytest

from llmbuild.builder.models.families import family_of
from llmbuild.errors import ModelError

Check = Callable[..., None]
FULL, SLIDING = "full_attention", "sliding_attention"
SIZES = {"num_hidden_layers": 3, "max_position_embeddings": 64, "sliding_window": 7}


def published(**overrides: Any) -> dict[str, Any]:
    """Ministral-8B-Instruct-2410, by the values that are published for it."""
    return {
        "architectures": ["MinistralForCausalLM"],
        "attention_dropout": 0.0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "head_dim": 128,
        "hidden_act": "silu",
        "hidden_size": 4096,
        "initializer_range": 0.02,
        "intermediate_size": 12288,
        "layer_types": [FULL, SLIDING, SLIDING, SLIDING] * 9,
        "max_position_embeddings": 131072,
        "model_type": "ministral",
        "num_attention_heads": 32,
        "num_hidden_layers": 36,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-05,
        "rope_theta": 100000000.0,
        "sliding_window": 32768,
        "tie_word_embeddings": False,
        "use_cache": True,
        "vocab_size": 131072,
    } | overrides


@pytest.mark.parametrize(
    "overrides",
    [
        {},
        {"layer_types": [FULL, SLIDING, FULL], "num_key_value_heads": 1},
        {"layer_types": [SLIDING, FULL, SLIDING], "num_key_value_heads": 6},
        {"layer_types": [FULL, FULL, SLIDING], "tie_word_embeddings": True},
    ],
    ids=str,
)
def test_decoder_equals_transformers(
    hf_model: Callable[..., Any], assert_decoder_matches: Check, overrides: dict[str, Any]
) -> None:
    assert_decoder_matches(hf_model("ministral", **SIZES | overrides))


@pytest.mark.slow
def test_engine_equals_transformers(
    hf_model: Callable[..., Any], assert_engine_matches: Check
) -> None:
    assert_engine_matches(hf_model("ministral", **SIZES, layer_types=[FULL, SLIDING, FULL]))


def test_published_config_has_one_full_layer_in_four() -> None:
    raw = published()
    config = family_of(raw).translate(raw)
    assert config.windows == (0, 32768, 32768, 32768) * 9
    assert (config.head_dim, config.ropes[0].theta, config.q_size) == (128, 1e8, 4096)


@pytest.mark.parametrize(
    ("overrides", "named"),
    [
        ({"sliding_window": None}, "sliding_window"),
        ({"layer_types": ["chunked_attention"] * 36}, "layer_types"),
        ({"attention_bias": True}, "attention_bias"),
    ],
    ids=str,
)
def test_config_that_means_something_else_is_refused(overrides: dict[str, Any], named: str) -> None:
    raw = published(**overrides)
    with pytest.raises(ModelError, match=named):
        family_of(raw).translate(raw)
