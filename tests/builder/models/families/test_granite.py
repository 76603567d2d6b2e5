"""Granite's dense models: held to transformers, and to a config as published."""

from collections.abc import Callable
from typing import Any

import pytest

from llmbuild.builder.models.families import family_of
from llmbuild.errors import ModelError

SCALED = {
    "max_position_embeddings": 64,
    "attention_multiplier": 0.11,
    "embedding_multiplier": 12.0,
    "residual_multiplier": 0.22,
    "logits_scaling": 16.0,
}
GRANITE_3_3_8B = {
    "architectures": ["GraniteForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "attention_multiplier": 0.0078125,
    "bos_token_id": 0,
    "embedding_multiplier": 12.0,
    "eos_token_id": 0,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 12800,
    "logits_scaling": 16.0,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "model_type": "granite",
    "num_attention_heads": 32,
    "num_hidden_layers": 40,
    "num_key_value_heads": 8,
    "pad_token_id": 0,
    "residual_multiplier": 0.22,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 10000000.0,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.49.0",
    "use_cache": True,
    "vocab_size": 49159,
}
VARIANTS = {
    "groups of 3": {},
    "one kv head, tied": {"num_key_value_heads": 1, "tie_word_embeddings": True},
    "a kv head for each": {"num_key_value_heads": 6, "hidden_act": "gelu"},
    "biases": {"attention_bias": True, "mlp_bias": True, "vocab_size": 101},
    "no multipliers": {name: 1.0 for name in SCALED if name != "max_position_embeddings"},
    "linear": {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.5}},
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_granite_decoder_equals_transformers(
    hf_model: Callable[..., Any], assert_decoder_matches: Callable[..., None], variant: str
) -> None:
    assert_decoder_matches(hf_model("granite", **(SCALED | VARIANTS[variant])))


@pytest.mark.slow
def test_granite_engine_equals_transformers(
    hf_model: Callable[..., Any], assert_engine_matches: Callable[..., None]
) -> None:
    assert_engine_matches(hf_model("granite", **(SCALED | VARIANTS["one kv head, tied"])))


@pytest.mark.slow
def test_granite_engine_with_biases_equals_transformers(
    hf_model: Callable[..., Any], assert_engine_matches: Callable[..., None]
) -> None:
    assert_engine_matches(hf_model("granite", **(SCALED | VARIANTS["biases"])))


def test_granite_3_3_8b_translates_as_published() -> None:
    config = family_of(GRANITE_3_3_8B).translate(GRANITE_3_3_8B)
    assert config.attention_scale == 1 / 128
    assert config.embed_scale == 12.0
    assert config.residual_scale == 0.22
    assert config.logit_scale == 1 / 16
    assert config.head_dim == 128
    assert config.tie_embeddings
    assert config.ropes[0].theta == 1e7


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("attention_multiplier", 0.0),
        ("logits_scaling", None),
        ("num_local_experts", 40),
        ("position_embedding_type", "nope"),
    ],
)
def test_granite_refuses_what_it_does_not_compute_by_name(key: str, value: Any) -> None:
    raw = GRANITE_3_3_8B | {key: value}
    with pytest.raises(ModelError, match=key):
        family_of(raw).translate(raw)
