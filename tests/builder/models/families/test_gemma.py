"""Gemma: held to transformers, and to configs as published."""

from collections.abc import Callable
from typing import Any

import pytest

from llmbuild.builder.models.families import family_of
from llmbuild.errors import ModelError

LONG = {"max_position_embeddings": 64}
GEMMA_7B_IT = {
    "architectures": ["GemmaForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 2,
    "eos_token_id": 1,
    "head_dim": 256,
    "hidden_act": "gelu",
    "hidden_activation": None,
    "hidden_size": 3072,
    "initializer_range": 0.02,
    "intermediate_size": 24576,
    "max_position_embeddings": 8192,
    "model_type": "gemma",
    "num_attention_heads": 16,
    "num_hidden_layers": 28,
    "num_key_value_heads": 16,
    "pad_token_id": 0,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 10000.0,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.40.0.dev0",
    "use_cache": True,
    "vocab_size": 256000,
}
VARIANTS = {
    "groups of 3": {},
    "one kv head, untied": {"num_key_value_heads": 1, "tie_word_embeddings": False},
    "a kv head for each, gelu": {"num_key_value_heads": 6, "hidden_act": "gelu"},
    "biases": {"attention_bias": True, "head_dim": 10, "vocab_size": 101},
    "linear": {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.5}},
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_gemma_decoder_equals_transformers(
    hf_model: Callable[..., Any], assert_decoder_matches: Callable[..., None], variant: str
) -> None:
    assert_decoder_matches(hf_model("gemma", **(LONG | VARIANTS[variant])))


@pytest.mark.slow
def test_gemma_engine_equals_transformers(
    hf_model: Callable[..., Any], assert_engine_matches: Callable[..., None]
) -> None:
    assert_engine_matches(hf_model("gemma", **LONG))


def test_gemma_7b_translates_as_published() -> None:
    config = family_of(GEMMA_7B_IT).translate(GEMMA_7B_IT)
    assert (config.num_heads, config.num_kv_heads, config.head_dim) == (16, 16, 256)
    assert config.activation == "gelu_tanh"
    assert config.embed_scale == pytest.approx(55.4256, abs=1e-4)
    assert config.attention_scale == 0.0625
    assert config.tie_embeddings
    assert config.norm.plus_one


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("hidden_act", "silu"),
        ("hidden_activation", "silu"),
        ("use_bidirectional_attention", True),
        ("final_logit_softcapping", 30.0),
        ("head_dim", 7),
    ],
)
def test_gemma_refuses_what_it_does_not_compute_by_name(key: str, value: Any) -> None:
    raw = GEMMA_7B_IT | {key: value}
    with pytest.raises(ModelError, match=key):
        family_of(raw).translate(raw)


def test_gemma_refuses_a_config_without_head_dim() -> None:
    raw = {key: value for key, value in GEMMA_7B_IT.items() if key != "head_dim"}
    with pytest.raises(ModelError, match="head_dim"):
        family_of(raw).translate(raw)
