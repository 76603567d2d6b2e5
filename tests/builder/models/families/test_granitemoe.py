"""Granite's mixtures of experts, without and with a shared MLP: held to transformers."""

from collections.abc import Callable
from typing import Any

import pytest

from llmbuild.builder.models.config import MoeConfig
from llmbuild.builder.models.families import family_of
from llmbuild.errors import ModelError

MULTIPLIERS = {
    "attention_multiplier": 0.21,
    "embedding_multiplier": 3.5,
    "logits_scaling": 6.0,
    "residual_multiplier": 0.22,
}
SMALL_MOE = MULTIPLIERS | {
    "experts_implementation": "eager",  # grouped_mm takes only rows of whole 16 bytes
    "max_position_embeddings": 64,
    "num_local_experts": 7,
    "num_experts_per_tok": 3,
}
GRANITE_3_1B_A400M = {
    "architectures": ["GraniteMoeForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.1,
    "attention_multiplier": 0.015625,
    "bos_token_id": 0,
    "embedding_multiplier": 12.0,
    "eos_token_id": 0,
    "hidden_act": "silu",
    "hidden_size": 1024,
    "initializer_range": 0.02,
    "intermediate_size": 512,
    "logits_scaling": 6.0,
    "max_position_embeddings": 4096,
    "model_type": "granitemoe",
    "num_attention_heads": 16,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 24,
    "num_key_value_heads": 8,
    "num_local_experts": 32,
    "output_router_logits": False,
    "pad_token_id": 0,
    "residual_multiplier": 0.22,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 10000,
    "router_aux_loss_coef": 0.0,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.46.0.dev0",
    "use_cache": True,
    "vocab_size": 49155,
}


@pytest.mark.parametrize(
    ("family", "overrides"),
    [
        pytest.param("granitemoe", {}, id="3 of 7"),
        pytest.param(
            "granitemoe",
            {"attention_bias": True, "tie_word_embeddings": True, "num_key_value_heads": 6},
            id="biases, tied, groups of 1",
        ),
        pytest.param(
            "granitemoe",
            {"num_local_experts": 67, "num_experts_per_tok": 1, "num_attention_heads": 5}
            | {"num_key_value_heads": 1},
            id="1 of 67, one group",
        ),
        pytest.param("granitemoeshared", {"shared_intermediate_size": 29}, id="shared MLP"),
        pytest.param("granitemoeshared", {"shared_intermediate_size": 0}, id="shared MLP of none"),
    ],
)
def test_decoder_equals_transformers(
    hf_model: Callable[..., Any],
    assert_decoder_matches: Callable[..., None],
    family: str,
    overrides: Any,
) -> None:
    assert_decoder_matches(hf_model(family, **SMALL_MOE | overrides))


@pytest.mark.slow
def test_engine_equals_transformers(
    hf_model: Callable[..., Any], assert_engine_matches: Callable[..., None]
) -> None:
    saved = hf_model("granitemoeshared", **SMALL_MOE, shared_intermediate_size=29)
    assert_engine_matches(saved)


@pytest.mark.slow
def test_engine_without_a_shared_mlp_equals_transformers(
    hf_model: Callable[..., Any], assert_engine_matches: Callable[..., None]
) -> None:
    assert_engine_matches(hf_model("granitemoe", **SMALL_MOE))


def test_published_config_is_translated() -> None:
    config = family_of(GRANITE_3_1B_A400M).translate(GRANITE_3_1B_A400M)
    assert config.moe == MoeConfig(32, 8, 512, scoring="top_k_softmax")
    assert config.moe_layers == (True,) * 24
    assert (config.attention_scale, config.embed_scale) == (0.015625, 12.0)
    assert (config.residual_scale, config.logit_scale) == (0.22, 1 / 6)
    assert config.tie_embeddings


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"num_experts_per_tok": 33}, "num_experts_per_tok is 33"),
        ({"num_local_experts": 0}, "num_local_experts is 0"),
        ({"attention_multiplier": None}, "attention_multiplier is None"),
        ({"shared_intermediate_size": 64}, r"shared_intermediate_size \(64\)"),
        ({"layer_types": ["mamba"]}, "layer_types"),
    ],
)
def test_config_that_is_not_understood_is_refused_by_key(change: Any, named: str) -> None:
    raw = GRANITE_3_1B_A400M | change
    with pytest.raises(ModelError, match=named):
        family_of(raw).translate(raw)
