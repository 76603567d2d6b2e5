"""OLMo 3: held to transformers."""

from collections.abc import Callable
from typing import Any

import pytest

from llmbuild.builder.models.families import family_of
from llmbuild.errors import ModelError

Check = Callable[..., None]
FULL, SLIDING = "full_attention", "sliding_attention"
SIZES = {
    "num_hidden_layers": 4,
    "max_position_embeddings": 64,
    "sliding_window": 7,
    "eos_token_id": 1,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 5e5,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
}


def published(**overrides: Any) -> dict[str, Any]:
    """The published config of Olmo-3-7B-Instruct."""
    return {
        "architectures": ["Olmo3ForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "eos_token_id": 100257,
        "hidden_act": "silu",
        "hidden_size": 4096,
        "initializer_range": 0.02,
        "intermediate_size": 11008,
        "layer_types": [SLIDING, SLIDING, SLIDING, FULL] * 8,
        "max_position_embeddings": 65536,
        "model_type": "olmo3",
        "num_attention_heads": 32,
        "num_hidden_layers": 32,
        "num_key_value_heads": 32,
        "pad_token_id": 100277,
        "rms_norm_eps": 1e-06,
        "rope_scaling": {
            "attention_factor": 1.2079441541679836,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "factor": 8.0,
            "original_max_position_embeddings": 8192,
            "rope_type": "yarn",
        },
        "rope_theta": 500000,
        "sliding_window": 4096,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "transformers_version": "4.57.1",
        "use_cache": True,
        "vocab_size": 100278,
    } | overrides


@pytest.mark.parametrize(
    "overrides",
    [
        {},
        {"num_key_value_heads": 1, "layer_types": [FULL, SLIDING, SLIDING, FULL]},
        {"num_key_value_heads": 6, "attention_bias": True, "tie_word_embeddings": True},
        {"rope_scaling": {key: YARN[key] for key in YARN if key != "rope_theta"}},
        {
            "rope_parameters": {
                FULL: YARN | {"rope_theta": 1e4},
                SLIDING: {"rope_type": "linear", "rope_theta": 3e3, "factor": 2.0},
            }
        },
        {"layer_types": [FULL] * 4, "sliding_window": 7},
    ],
    ids=str,
)
def test_decoder_equals_transformers(
    hf_model: Callable[..., Any], assert_decoder_matches: Check, overrides: dict[str, Any]
) -> None:
    assert_decoder_matches(hf_model("olmo3", **SIZES | overrides))


@pytest.mark.slow
def test_engine_equals_transformers_with_scaling_in_full_layers_alone(
    hf_model: Callable[..., Any], assert_engine_matches: Check
) -> None:
    ropes = {FULL: YARN, SLIDING: {"rope_type": "default", "rope_theta": 5e5}}
    assert_engine_matches(hf_model("olmo3", **SIZES, rope_parameters=ropes))


def test_published_config_scales_rope_in_full_layers_alone() -> None:
    raw = published()
    config = family_of(raw).translate(raw)
    kinds = [config.ropes[index].kind for index in config.layer_ropes]
    assert kinds == ["default", "default", "default", "yarn"] * 8
    assert config.windows == (4096, 4096, 4096, 0) * 8
    assert max(rope.attention_factor for rope in config.ropes) == 1.2079441541679836
    assert {rope.theta for rope in config.ropes} == {5e5}


def test_every_fourth_layer_is_full_where_no_types_are_given() -> None:
    raw = published(layer_types=None)
    assert family_of(raw).translate(raw) == family_of(raw).translate(published())


@pytest.mark.parametrize(
    ("overrides", "named"),
    [
        ({"clip_qkv": 8.0}, "clip_qkv"),
        ({"rope_theta": 10000.0}, "rope_theta"),
        ({"sliding_window": None}, "sliding_window"),
        ({"layer_types": [FULL]}, "layer_types"),
        ({"rope_parameters": {FULL: YARN}}, "both rope_scaling and rope_parameters"),
        ({"rope_scaling": None, "rope_parameters": YARN}, "factor"),
        ({"use_qk_norm": False}, "use_qk_norm"),
    ],
    ids=str,
)
def test_config_that_means_something_else_is_refused(overrides: dict[str, Any], named: str) -> None:
    raw = published(**overrides)
    with pytest.raises(ModelError, match=named):
        family_of(raw).translate(raw)
