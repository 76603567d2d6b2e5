"""Cohere's Command-R and Aya: held to transformers, and to configs as published."""

from collections.abc import Callable
from typing import Any

import pytest

from llmbuild.builder.models.families import family_of
from llmbuild.errors import ModelError

LONG = {"max_position_embeddings": 64, "eos_token_id": 2}
AYA_23_8B = {
    "architectures": ["CohereForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 5,
    "eos_token_id": 255001,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 14336,
    "layer_norm_eps": 1e-05,
    "logit_scale": 0.0625,
    "max_position_embeddings": 8192,
    "model_type": "cohere",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "pad_token_id": 0,
    "rope_theta": 10000,
    "torch_dtype": "float16",
    "transformers_version": "4.40.0.dev0",
    "use_cache": True,
    "use_qk_norm": False,
    "vocab_size": 256000,
}
COMMAND_R = AYA_23_8B | {
    "hidden_size": 8192,
    "intermediate_size": 22528,
    "model_max_length": 131072,
    "num_attention_heads": 64,
    "num_hidden_layers": 40,
    "num_key_value_heads": 64,
    "rope_theta": 8000000.0,
}
VARIANTS = {
    "groups of 3": {},
    "one kv head, untied": {"num_key_value_heads": 1, "tie_word_embeddings": False},
    "a kv head for each": {"num_key_value_heads": 6, "logit_scale": 0.3},
    "biases": {"attention_bias": True, "head_dim": 10, "vocab_size": 101},
    "linear": {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.5}},
    "wide eps": {"layer_norm_eps": 0.1, "hidden_act": "gelu"},
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_cohere_decoder_equals_transformers(
    hf_model: Callable[..., Any], assert_decoder_matches: Callable[..., None], variant: str
) -> None:
    assert_decoder_matches(hf_model("cohere", **(LONG | VARIANTS[variant])))


@pytest.mark.slow
def test_cohere_engine_equals_transformers(
    hf_model: Callable[..., Any], assert_engine_matches: Callable[..., None]
) -> None:
    assert_engine_matches(hf_model("cohere", **LONG))


@pytest.mark.slow
@pytest.mark.parametrize("variant", ["one kv head, untied", "biases"])
def test_cohere_engine_variants_equal_transformers(
    hf_model: Callable[..., Any], assert_engine_matches: Callable[..., None], variant: str
) -> None:
    assert_engine_matches(hf_model("cohere", **(LONG | VARIANTS[variant])))


def test_aya_23_8b_translates_as_published() -> None:
    config = family_of(AYA_23_8B).translate(AYA_23_8B)
    assert (config.norm.kind, config.norm.bias, config.norm.eps) == ("layer", False, 1e-5)
    assert config.parallel_residual
    assert config.shared_norm
    assert config.rope_interleaved
    assert config.logit_scale == 0.0625
    assert config.tie_embeddings
    assert config.max_position == 8192


def test_command_r_reaches_as_far_as_model_max_length() -> None:
    config = family_of(COMMAND_R).translate(COMMAND_R)
    assert config.max_position == 131072
    assert config.ropes[0].theta == 8e6


@pytest.mark.parametrize(
    ("key", "value"),
    [("use_qk_norm", True), ("rms_norm_eps", 1e-5), ("sliding_window", 4096), ("logit_scale", 0)],
)
def test_cohere_refuses_what_it_does_not_compute_by_name(key: str, value: Any) -> None:
    raw = AYA_23_8B | {key: value}
    with pytest.raises(ModelError, match=key):
        family_of(raw).translate(raw)
