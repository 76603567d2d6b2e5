"""SmolLM3: held to transformers."""

from collections.abc import Callable
from typing import Any

import pytest

from llmbuild.builder.models.config import NO_ROPE
from llmbuild.builder.models.families import family_of
from llmbuild.errors import ModelError

Check = Callable[..., None]
FULL, SLIDING = "full_attention", "sliding_attention"
SIZES = {
    "num_hidden_layers": 4,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "bos_token_id": 2,
}


def published(**overrides: Any) -> dict[str, Any]:
    """The published config of SmolLM3-3B."""
    return {
        "architectures": ["SmolLM3ForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": None,
        "eos_token_id": 128012,
        "hidden_act": "silu",
        "hidden_size": 2048,
        "initializer_range": 0.02,
        "intermediate_size": 11008,
        "layer_types": [FULL] * 36,
        "max_position_embeddings": 65536,
        "max_window_layers": 28,
        "mlp_bias": False,
        "model_type": "smollm3",
        "no_rope_layer_interval": 4,
        "no_rope_layers": [1, 1, 1, 0] * 9,
        "num_attention_heads": 16,
        "num_hidden_layers": 36,
        "num_key_value_heads": 4,
        "pad_token_id": 128004,
        "pretraining_tp": 2,
        "rms_norm_eps": 1e-06,
        "rope_scaling": None,
        "rope_theta": 5000000.0,
        "sliding_window": None,
        "torch_dtype": "bfloat16",
        "transformers_version": "4.54.0.dev0",
        "use_cache": False,
        "use_sliding_window": False,
        "vocab_size": 128256,
    } | overrides


@pytest.mark.parametrize(
    "overrides",
    [
        {},
        {"no_rope_layer_interval": 3, "num_key_value_heads": 1},
        {"no_rope_layers": [0, 1, 1, 0], "num_key_value_heads": 6, "tie_word_embeddings": False},
        {"use_sliding_window": True, "sliding_window": 7, "no_rope_layer_interval": 2},
        {
            "use_sliding_window": True,
            "sliding_window": 7,
            "layer_types": [SLIDING, FULL, FULL, SLIDING],
        },
        {"attention_bias": True, "mlp_bias": True},
    ],
    ids=str,
)
def test_decoder_equals_transformers(
    hf_model: Callable[..., Any], assert_decoder_matches: Check, overrides: dict[str, Any]
) -> None:
    assert_decoder_matches(hf_model("smollm3", **SIZES | overrides))


@pytest.mark.slow
def test_engine_equals_transformers_with_windows_in_layers_of_both_kinds(
    hf_model: Callable[..., Any], assert_engine_matches: Check
) -> None:
    types = [SLIDING, FULL, FULL, SLIDING]
    window = {"use_sliding_window": True, "sliding_window": 7, "layer_types": types}
    assert_engine_matches(hf_model("smollm3", **SIZES, **window, attention_bias=True))


def test_published_config_leaves_every_fourth_layer_without_rope() -> None:
    raw = published()
    config = family_of(raw).translate(raw)
    assert config.layer_ropes == (0, 0, 0, NO_ROPE) * 9
    assert (config.tie_embeddings, config.ropes[0].theta, config.head_dim) == (True, 5e6, 128)
    assert set(config.windows) == {0}


def test_interval_stands_for_the_list_where_there_is_none() -> None:
    raw = published()
    del raw["no_rope_layers"]
    assert family_of(raw).translate(raw).layer_ropes == (0, 0, 0, NO_ROPE) * 9


@pytest.mark.parametrize(
    ("overrides", "named"),
    [
        ({"no_rope_layers": [1, 0]}, "no_rope_layers"),
        ({"no_rope_layer_interval": 0}, "no_rope_layer_interval"),
        ({"layer_types": [SLIDING] * 36, "sliding_window": 7}, "use_sliding_window"),
        ({"layer_types": [SLIDING] * 36, "use_sliding_window": True}, "sliding_window"),
        ({"qk_norm": True}, "qk_norm"),
    ],
    ids=str,
)
def test_config_that_means_something_else_is_refused(overrides: dict[str, Any], named: str) -> None:
    raw = published(**overrides)
    with pytest.raises(ModelError, match=named):
        family_of(raw).translate(raw)
