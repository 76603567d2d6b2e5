"""Gemma 2: held to transformers, and to configs as published."""

from collections.abc import Callable
from typing import Any

import pytest

from llmbuild.builder.models.families import family_of
from llmbuild.errors import ModelError

# Windows below, at and above a chunk's length; caps that bend the scores of so small a model.
SHORT = {
    "max_position_embeddings": 64,
    "sliding_window": 5,
    "query_pre_attn_scalar": 11,
    "attn_logit_softcapping": 2.0,
    "final_logit_softcapping": 3.0,
}
GEMMA_2_2B = {
    "architectures": ["Gemma2ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "attn_logit_softcapping": 50.0,
    "bos_token_id": 2,
    "cache_implementation": "hybrid",
    "eos_token_id": [1, 107],
    "final_logit_softcapping": 30.0,
    "head_dim": 256,
    "hidden_act": "gelu_pytorch_tanh",
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size": 2304,
    "initializer_range": 0.02,
    "intermediate_size": 9216,
    "max_position_embeddings": 8192,
    "model_type": "gemma2",
    "num_attention_heads": 8,
    "num_hidden_layers": 26,
    "num_key_value_heads": 4,
    "pad_token_id": 0,
    "query_pre_attn_scalar": 256,
    "rms_norm_eps": 1e-06,
    "rope_theta": 10000.0,
    "sliding_window": 4096,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.42.4",
    "use_cache": True,
    "vocab_size": 256000,
}
GEMMA_2_27B = GEMMA_2_2B | {
    "head_dim": 128,
    "hidden_size": 4608,
    "intermediate_size": 36864,
    "num_attention_heads": 32,
    "num_hidden_layers": 46,
    "num_key_value_heads": 16,
    "query_pre_attn_scalar": 144,
}
VARIANTS = {
    "groups of 3": {},
    "one kv head, untied": {"num_key_value_heads": 1, "tie_word_embeddings": False},
    "a kv head for each": {"num_key_value_heads": 6, "sliding_window": 2},
    "biases, three layers": {"attention_bias": True, "num_hidden_layers": 3, "vocab_size": 101},
    "no caps": {"attn_logit_softcapping": None, "final_logit_softcapping": None},
    "layer_types": {"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 17},
    "full alone": {"layer_types": ["full_attention"] * 2, "head_dim": 10},
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_gemma2_decoder_equals_transformers(
    hf_model: Callable[..., Any], assert_decoder_matches: Callable[..., None], variant: str
) -> None:
    assert_decoder_matches(hf_model("gemma2", **(SHORT | VARIANTS[variant])))


def test_gemma2_engine_equals_transformers(
    hf_model: Callable[..., Any], assert_engine_matches: Callable[..., None]
) -> None:
    assert_engine_matches(hf_model("gemma2", **SHORT))


@pytest.mark.slow
@pytest.mark.parametrize("variant", ["one kv head, untied", "no caps"])
def test_gemma2_engine_variants_equal_transformers(
    hf_model: Callable[..., Any], assert_engine_matches: Callable[..., None], variant: str
) -> None:
    assert_engine_matches(hf_model("gemma2", **(SHORT | VARIANTS[variant])))


def test_gemma_2_2b_translates_as_published() -> None:
    config = family_of(GEMMA_2_2B).translate(GEMMA_2_2B)
    assert config.windows == (4096, 0) * 13
    assert (config.attention_soft_cap, config.logit_soft_cap) == (50.0, 30.0)
    assert config.attention_scale == 0.0625
    assert config.embed_scale == 48.0
    assert config.pre_norm
    assert config.post_norm
    assert config.tie_embeddings


def test_gemma_2_27b_scales_attention_apart_from_head_dim() -> None:
    config = family_of(GEMMA_2_27B).translate(GEMMA_2_27B)
    assert config.head_dim == 128
    assert config.attention_scale == pytest.approx(1 / 12)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("hidden_activation", "gelu"),
        ("use_bidirectional_attention", True),
        ("sliding_window", None),
        ("sliding_window_pattern", 3),
        ("layer_types", ["full_attention"]),
        ("attn_logit_softcapping", -1.0),
        ("rope_local_base_freq", 10000.0),
    ],
)
def test_gemma2_refuses_what_it_does_not_compute_by_name(key: str, value: Any) -> None:
    raw = GEMMA_2_2B | {key: value}
    with pytest.raises(ModelError, match=key):
        family_of(raw).translate(raw)


@pytest.mark.parametrize(
    "key", ["query_pre_attn_scalar", "attn_logit_softcapping", "final_logit_softcapping"]
)
def test_gemma2_refuses_to_guess_what_one_model_has(key: str) -> None:
    raw = {name: value for name, value in GEMMA_2_2B.items() if name != key}
    with pytest.raises(ModelError, match=key):
        family_of(raw).translate(raw)
