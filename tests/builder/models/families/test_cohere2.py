"""Cohere's Command-R7B: held to transformers, and to a config as published."""

from collections.abc import Callable
from typing import Any

import pytest

from llmbuild.builder.models.config import NO_ROPE
from llmbuild.builder.models.families import family_of
from llmbuild.errors import ModelError

FULL, SLIDING = "full_attention", "sliding_attention"
SHORT = {
    "max_position_embeddings": 64,
    "sliding_window": 5,
    "sliding_window_pattern": 2,
    "eos_token_id": 2,
}
COMMAND_R7B = {
    "architectures": ["Cohere2ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 5,
    "cache_implementation": "hybrid",
    "eos_token_id": 255001,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 14336,
    "layer_norm_eps": 1e-05,
    "layer_switch": 4,
    "logit_scale": 0.25,
    "max_position_embeddings": 8192,
    "model_type": "cohere2",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "order_of_interleaved_layers": "local_attn_first",
    "pad_token_id": 0,
    "position_embedding_type": "rope_gptj",
    "rope_scaling": None,
    "rope_theta": 50000,
    "rotary_pct": 1.0,
    "sliding_window": 4096,
    "sliding_window_pattern": 4,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.48.0.dev0",
    "use_cache": True,
    "use_embedding_sharing": True,
    "use_gated_activation": True,
    "use_parallel_block": True,
    "use_parallel_embedding": True,
    "vocab_size": 256000,
}
VARIANTS = {
    "groups of 3": {},
    "one kv head, untied": {"num_key_value_heads": 1, "tie_word_embeddings": False},
    "a kv head for each": {"num_key_value_heads": 6, "logit_scale": 0.3, "sliding_window": 2},
    "biases, pattern of 3": {
        "attention_bias": True,
        "num_hidden_layers": 4,
        "sliding_window_pattern": 3,
        "vocab_size": 101,
    },
    "layer_types": {"layer_types": [FULL, SLIDING], "sliding_window": 17, "head_dim": 10},
    "full alone": {"layer_types": [FULL] * 2},
    "linear": {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.5}},
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_cohere2_decoder_equals_transformers(
    hf_model: Callable[..., Any], assert_decoder_matches: Callable[..., None], variant: str
) -> None:
    assert_decoder_matches(hf_model("cohere2", **(SHORT | VARIANTS[variant])))


@pytest.mark.slow
def test_cohere2_engine_equals_transformers(
    hf_model: Callable[..., Any], assert_engine_matches: Callable[..., None]
) -> None:
    assert_engine_matches(hf_model("cohere2", **SHORT))


@pytest.mark.slow
@pytest.mark.parametrize("variant", ["one kv head, untied", "full alone"])
def test_cohere2_engine_variants_equal_transformers(
    hf_model: Callable[..., Any], assert_engine_matches: Callable[..., None], variant: str
) -> None:
    assert_engine_matches(hf_model("cohere2", **(SHORT | VARIANTS[variant])))


def test_command_r7b_translates_as_published() -> None:
    config = family_of(COMMAND_R7B).translate(COMMAND_R7B)
    assert config.windows == (4096, 4096, 4096, 0) * 8
    assert config.layer_ropes == (0, 0, 0, NO_ROPE) * 8
    assert config.ropes[0].theta == 50_000.0
    assert config.logit_scale == 0.25
    assert config.parallel_residual
    assert config.shared_norm
    assert config.tie_embeddings


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("use_qk_norm", True),
        ("use_parallel_block", False),
        ("use_gated_activation", False),
        ("order_of_interleaved_layers", "global_attn_first"),
        ("position_embedding_type", "nope"),
        ("rotary_pct", 0.5),
        ("layer_switch", 2),
        ("sliding_window", None),
        ("num_experts", 8),
    ],
)
def test_cohere2_refuses_what_it_does_not_compute_by_name(key: str, value: Any) -> None:
    raw = COMMAND_R7B | {key: value}
    with pytest.raises(ModelError, match=key):
        family_of(raw).translate(raw)
