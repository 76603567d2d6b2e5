"""EXAONE 4: held to transformers."""

from collections.abc import Callable
from typing import Any

import pytest

from llmbuild.builder.models.config import NO_ROPE
from llmbuild.builder.models.families import family_of
from llmbuild.errors import ModelError

Check = Callable[..., None]
FULL, SLIDING = "full_attention", "sliding_attention"
SIZES = {"num_hidden_layers": 4, "max_position_embeddings": 64}
NO_WINDOW = {"sliding_window": None, "layer_types": [FULL] * 4}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 1e4,
    "factor": 16.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}


def published(**overrides: Any) -> dict[str, Any]:
    """The published config of EXAONE-4.0-32B."""
    return {
        "architectures": ["Exaone4ForCausalLM"],
        "attention_dropout": 0.0,
        "bos_token_id": 1,
        "eos_token_id": 361,
        "head_dim": 128,
        "hidden_act": "silu",
        "hidden_size": 5120,
        "initializer_range": 0.02,
        "intermediate_size": 27392,
        "layer_types": [SLIDING, SLIDING, SLIDING, FULL] * 16,
        "max_position_embeddings": 131072,
        "model_type": "exaone4",
        "num_attention_heads": 40,
        "num_hidden_layers": 64,
        "num_key_value_heads": 8,
        "pad_token_id": 0,
        "rms_norm_eps": 1e-05,
        "rope_scaling": {
            "factor": 16.0,
            "high_freq_factor": 4.0,
            "low_freq_factor": 1.0,
            "original_max_position_embeddings": 8192,
            "rope_type": "llama3",
        },
        "rope_theta": 1000000,
        "sliding_window": 4096,
        "sliding_window_pattern": "LLLG",
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "transformers_version": "4.54.0",
        "use_cache": True,
        "vocab_size": 102400,
    } | overrides


@pytest.mark.parametrize(
    "overrides",
    [
        {"sliding_window": 7},
        {"sliding_window": 5, "sliding_window_pattern": 2, "num_key_value_heads": 1},
        {"sliding_window": 41, "layer_types": [FULL, SLIDING, FULL, FULL]},
        NO_WINDOW | {"num_key_value_heads": 6, "tie_word_embeddings": True},
        NO_WINDOW | {"rope_parameters": LLAMA3},
    ],
    ids=str,
)
def test_decoder_equals_transformers(
    hf_model: Callable[..., Any], assert_decoder_matches: Check, overrides: dict[str, Any]
) -> None:
    assert_decoder_matches(hf_model("exaone4", **SIZES | overrides))


@pytest.mark.slow
def test_engine_equals_transformers_with_windows_and_layers_without_rope(
    hf_model: Callable[..., Any], assert_engine_matches: Check
) -> None:
    assert_engine_matches(hf_model("exaone4", **SIZES, sliding_window=7, rope_parameters=LLAMA3))


@pytest.mark.slow
def test_engine_equals_transformers_without_windows(
    hf_model: Callable[..., Any], assert_engine_matches: Check
) -> None:
    assert_engine_matches(hf_model("exaone4", **SIZES | NO_WINDOW))


def test_published_config_turns_the_layers_with_a_window_alone() -> None:
    raw = published()
    config = family_of(raw).translate(raw)
    assert config.layer_ropes == (0, 0, 0, NO_ROPE) * 16
    assert config.windows == (4096, 4096, 4096, 0) * 16
    assert (config.pre_norm, config.post_norm, config.qk_norm) == (False, True, "head")
    assert (config.ropes[0].kind, config.ropes[0].theta) == ("llama3", 1e6)


def test_without_a_window_every_layer_turns() -> None:
    """As in EXAONE-4.0-1.2B."""
    types = [FULL] * 30
    small = {"num_hidden_layers": 30, "layer_types": types, "sliding_window_pattern": None}
    raw = published(sliding_window=None, **small)
    config = family_of(raw).translate(raw)
    assert set(config.layer_ropes) == set(config.windows) == {0}


@pytest.mark.parametrize(
    ("overrides", "named"),
    [
        ({"layer_types": [FULL] * 63}, "layer_types"),
        ({"sliding_window": None}, "sliding_window"),
        ({"sliding_window": 0}, "sliding_window"),
        ({"attention_bias": True}, "attention_bias"),
    ],
    ids=str,
)
def test_config_that_means_something_else_is_refused(overrides: dict[str, Any], named: str) -> None:
    raw = published(**overrides)
    with pytest.raises(ModelError, match=named):
        family_of(raw).translate(raw)


@pytest.mark.parametrize("key", ["layer_types", "sliding_window", "num_key_value_heads"])
def test_key_whose_default_would_be_a_guess_is_called_for(key: str) -> None:
    raw = published()
    del raw[key]
    with pytest.raises(ModelError, match=f"lacks {key}"):
        family_of(raw).translate(raw)
