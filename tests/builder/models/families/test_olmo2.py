"""OLMo 2: held to transformers."""

from collections.abc import Callable
from typing import Any

import pytest

from llmbuild.builder.models.families import family_of
from llmbuild.errors import ModelError

Check = Callable[..., None]
SIZES = {"max_position_embeddings": 64, "eos_token_id": 1}


def published(**overrides: Any) -> dict[str, Any]:
    """The published config of OLMo-2-1124-7B."""
    return {
        "architectures": ["Olmo2ForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "eos_token_id": 100257,
        "hidden_act": "silu",
        "hidden_size": 4096,
        "initializer_range": 0.02,
        "intermediate_size": 11008,
        "max_position_embeddings": 4096,
        "model_type": "olmo2",
        "num_attention_heads": 32,
        "num_hidden_layers": 32,
        "num_key_value_heads": 32,
        "pad_token_id": 100277,
        "rms_norm_eps": 1e-06,
        "rope_scaling": None,
        "rope_theta": 500000,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
        "transformers_version": "4.47.0.dev0",
        "use_cache": True,
        "vocab_size": 100352,
    } | overrides


@pytest.mark.parametrize(
    "overrides",
    [
        {},
        {"num_key_value_heads": 1, "attention_bias": True},
        {"num_key_value_heads": 6, "tie_word_embeddings": True, "rms_norm_eps": 1e-2},
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 5e3, "factor": 2.0}},
    ],
    ids=str,
)
def test_decoder_equals_transformers(
    hf_model: Callable[..., Any], assert_decoder_matches: Check, overrides: dict[str, Any]
) -> None:
    assert_decoder_matches(hf_model("olmo2", **SIZES | overrides))


@pytest.mark.slow
def test_engine_equals_transformers(
    hf_model: Callable[..., Any], assert_engine_matches: Check
) -> None:
    assert_engine_matches(hf_model("olmo2", **SIZES, attention_bias=True))


def test_published_config_has_norms_after_and_over_the_whole_of_q_and_k() -> None:
    raw = published(clip_qkv=None)
    config = family_of(raw).translate(raw)
    assert (config.pre_norm, config.post_norm, config.qk_norm) == (False, True, "whole")
    assert (config.ropes[0].theta, config.norm.eps, config.num_kv_heads) == (5e5, 1e-6, 32)


@pytest.mark.parametrize(
    ("overrides", "named"),
    [({"clip_qkv": 8.0}, "clip_qkv"), ({"sliding_window": 4096}, "sliding_window")],
    ids=str,
)
def test_config_that_means_something_else_is_refused(overrides: dict[str, Any], named: str) -> None:
    raw = published(**overrides)
    with pytest.raises(ModelError, match=named):
        family_of(raw).translate(raw)
