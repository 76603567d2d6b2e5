"""Seed-OSS: held to transformers."""

from collections.abc import Callable
from typing import Any

import pytest

from llmbuild.builder.models.families import family_of
from llmbuild.errors import ModelError

Check = Callable[..., None]
SIZES = {"max_position_embeddings": 64}


def published(**overrides: Any) -> dict[str, Any]:
    """The published config of Seed-OSS-36B-Instruct."""
    return {
        "architectures": ["SeedOssForCausalLM"],
        "attention_bias": True,
        "attention_dropout": 0.1,
        "attention_out_bias": False,
        "bos_token_id": 0,
        "eos_token_id": 2,
        "head_dim": 128,
        "hidden_act": "silu",
        "hidden_size": 5120,
        "initializer_range": 0.02,
        "intermediate_size": 27648,
        "max_position_embeddings": 524288,
        "mlp_bias": False,
        "model_type": "seed_oss",
        "num_attention_heads": 80,
        "num_hidden_layers": 64,
        "num_key_value_heads": 8,
        "pad_token_id": 1,
        "residual_dropout": 0.1,
        "rms_norm_eps": 1e-06,
        "rope_scaling": {"rope_type": "default"},
        "rope_theta": 10000000.0,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "transformers_version": "4.55.0",
        "use_cache": True,
        "vocab_size": 155136,
    } | overrides


@pytest.mark.parametrize(
    "overrides",
    [
        {},
        {"num_key_value_heads": 1, "attention_bias": False, "mlp_bias": True},
        {"num_key_value_heads": 6, "attention_out_bias": True, "tie_word_embeddings": True},
    ],
    ids=str,
)
def test_decoder_equals_transformers(
    hf_model: Callable[..., Any], assert_decoder_matches: Check, overrides: dict[str, Any]
) -> None:
    assert_decoder_matches(hf_model("seed_oss", **SIZES | overrides))


@pytest.mark.slow
def test_engine_equals_transformers(
    hf_model: Callable[..., Any], assert_engine_matches: Check
) -> None:
    assert_engine_matches(hf_model("seed_oss", **SIZES))


def test_published_config_has_biases_on_q_k_and_v_alone() -> None:
    raw = published()
    config = family_of(raw).translate(raw)
    assert (config.qkv_bias, config.o_bias, config.mlp_bias) == (True, False, False)
    assert (config.q_size, config.hidden_size, config.ropes[0].theta) == (10240, 5120, 1e7)


def test_unknown_key_is_refused() -> None:
    raw = published(thinking_budget=512)
    with pytest.raises(ModelError, match="thinking_budget"):
        family_of(raw).translate(raw)
