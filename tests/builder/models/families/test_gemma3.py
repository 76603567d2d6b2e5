"""Gemma 3's text models: held to transformers, and to configs as published."""

from collections.abc import Callable
from typing import Any

import pytest

from llmbuild.builder.models.families import family_of
from llmbuild.errors import ModelError

FULL, SLIDING = "full_attention", "sliding_attention"
SHORT = {
    "max_position_embeddings": 64,
    "sliding_window": 5,
    "sliding_window_pattern": 2,
    "query_pre_attn_scalar": 11,
}
GEMMA_3_1B = {
    "architectures": ["Gemma3ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "attn_logit_softcapping": None,
    "bos_token_id": 2,
    "cache_implementation": "hybrid",
    "eos_token_id": [1, 106],
    "final_logit_softcapping": None,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size": 1152,
    "initializer_range": 0.02,
    "intermediate_size": 6912,
    "max_position_embeddings": 32768,
    "model_type": "gemma3_text",
    "num_attention_heads": 4,
    "num_hidden_layers": 26,
    "num_key_value_heads": 1,
    "pad_token_id": 0,
    "query_pre_attn_scalar": 256,
    "rms_norm_eps": 1e-06,
    "rope_local_base_freq": 10000,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": 512,
    "sliding_window_pattern": 6,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.50.0.dev0",
    "use_cache": True,
    "vocab_size": 262144,
}
GEMMA_3_270M = {
    key: value
    for key, value in GEMMA_3_1B.items()
    if key not in ("cache_implementation", "sliding_window_pattern")
} | {
    "_sliding_window_pattern": 6,
    "eos_token_id": 1,
    "hidden_size": 640,
    "intermediate_size": 2048,
    "layer_types": ([SLIDING] * 5 + [FULL]) * 3,
    "num_hidden_layers": 18,
    "rope_local_base_freq": 10000.0,
    "rope_theta": 1000000.0,
    "transformers_version": "4.55.0.dev0",
    "use_bidirectional_attention": False,
}
VARIANTS = {
    "groups of 3": {},
    "one kv head, untied": {"num_key_value_heads": 1, "tie_word_embeddings": False},
    "a kv head for each": {"num_key_value_heads": 6, "sliding_window": 2},
    "biases, pattern of 3": {
        "attention_bias": True,
        "num_hidden_layers": 4,
        "sliding_window_pattern": 3,
        "vocab_size": 101,
    },
    "capped logits": {"final_logit_softcapping": 3.0},
    "layer_types": {"layer_types": [FULL, SLIDING], "sliding_window": 17, "head_dim": 10},
    "windows alone": {"layer_types": [SLIDING] * 2},
    "two ropes": {
        "rope_parameters": {
            FULL: {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
            SLIDING: {"rope_type": "default", "rope_theta": 50.0},
        }
    },
    "two scaled ropes": {
        "rope_parameters": {
            FULL: {
                "rope_type": "llama3",
                "rope_theta": 5e3,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 16,
            },
            SLIDING: {"rope_type": "linear", "rope_theta": 50.0, "factor": 3.0},
        }
    },
    "older spelling": {
        "rope_theta": 5e3,
        "rope_local_base_freq": 50.0,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
    },
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_gemma3_decoder_equals_transformers(
    hf_model: Callable[..., Any], assert_decoder_matches: Callable[..., None], variant: str
) -> None:
    assert_decoder_matches(hf_model("gemma3_text", **(SHORT | VARIANTS[variant])))


@pytest.mark.slow
def test_gemma3_engine_equals_transformers(
    hf_model: Callable[..., Any], assert_engine_matches: Callable[..., None]
) -> None:
    assert_engine_matches(hf_model("gemma3_text", **(SHORT | VARIANTS["two ropes"])))


@pytest.mark.slow
@pytest.mark.parametrize("variant", ["one kv head, untied", "windows alone"])
def test_gemma3_engine_variants_equal_transformers(
    hf_model: Callable[..., Any], assert_engine_matches: Callable[..., None], variant: str
) -> None:
    assert_engine_matches(hf_model("gemma3_text", **(SHORT | VARIANTS[variant])))


@pytest.mark.parametrize("raw", [GEMMA_3_1B, GEMMA_3_270M])
def test_gemma_3_translates_as_published(raw: dict[str, Any]) -> None:
    config = family_of(raw).translate(raw)
    assert {i for i, window in enumerate(config.windows) if not window} == {
        i for i in range(config.num_layers) if i % 6 == 5
    }
    assert set(config.windows) == {0, 512}
    thetas = [config.ropes[rope].theta for rope in config.layer_ropes[4:6]]
    assert thetas == [10_000.0, 1_000_000.0]
    assert config.qk_norm == "head"
    assert config.attention_scale == 0.0625
    assert config.tie_embeddings
    assert (config.attention_soft_cap, config.logit_soft_cap) == (0.0, 0.0)


def test_gemma3_reads_both_spellings_of_two_ropes_alike() -> None:
    newer = {key: value for key, value in GEMMA_3_1B.items() if not key.startswith("rope_")} | {
        "rope_parameters": {
            FULL: {"rope_type": "linear", "factor": 8.0, "rope_theta": 1000000},
            SLIDING: {"rope_type": "default", "rope_theta": 10000},
        }
    }
    older = GEMMA_3_1B | {"rope_scaling": {"rope_type": "linear", "factor": 8.0}}
    assert family_of(newer).translate(newer) == family_of(older).translate(older)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("hidden_activation", "silu"),
        ("use_bidirectional_attention", True),
        ("attn_logit_softcapping", 50.0),
        ("sliding_window", None),
        ("_sliding_window_pattern", 4),
        ("rope_parameters", {"rope_type": "default", "rope_theta": 1e4}),
        ("num_kv_shared_layers", 2),
    ],
)
def test_gemma3_refuses_what_it_does_not_compute_by_name(key: str, value: Any) -> None:
    raw = GEMMA_3_1B | {key: value}
    with pytest.raises(ModelError, match=key):
        family_of(raw).translate(raw)


def test_multimodal_gemma3_is_refused_as_no_text_model() -> None:
    raw = {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "model_type": "gemma3",
        "text_config": GEMMA_3_1B,
        "vision_config": {"model_type": "siglip_vision_model"},
    }
    with pytest.raises(ModelError, match="only text models are supported"):
        family_of(raw)
