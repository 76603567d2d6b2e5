"""Mixtral: held to transformers."""

from collections.abc import Callable
from typing import Any

import pytest

from llmbuild.builder.models.config import MoeConfig
from llmbuild.builder.models.families import family_of
from llmbuild.errors import ModelError

# The default, grouped_mm, takes only rows of whole 16 bytes.
LONG = {"max_position_embeddings": 64, "experts_implementation": "eager"}
MIXTRAL_8X7B = {
    "architectures": ["MixtralForCausalLM"],
    "attention_dropout": 0.0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 14336,
    "max_position_embeddings": 32768,
    "model_type": "mixtral",
    "num_attention_heads": 32,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "num_local_experts": 8,
    "output_router_logits": False,
    "rms_norm_eps": 1e-05,
    "rope_theta": 1000000.0,
    "router_aux_loss_coef": 0.02,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.36.0.dev0",
    "use_cache": True,
    "vocab_size": 32000,
}


@pytest.mark.parametrize(
    "overrides",
    [
        pytest.param({"num_local_experts": 8}, id="2 of 8"),
        pytest.param({"num_local_experts": 5, "num_experts_per_tok": 1}, id="1 of 5"),
        pytest.param({"num_local_experts": 3, "num_experts_per_tok": 3}, id="3 of 3"),
        pytest.param({"num_local_experts": 1, "num_experts_per_tok": 1}, id="1 of 1"),
        pytest.param(
            {
                "num_local_experts": 7,
                "num_experts_per_tok": 3,
                "sliding_window": 6,
                "num_attention_heads": 5,
                "num_key_value_heads": 1,
                "tie_word_embeddings": True,
            },
            id="window, one group, tied",
        ),
        pytest.param(
            {"num_attention_heads": 3, "num_key_value_heads": 3, "hidden_act": "gelu"},
            id="groups of 1, gelu",
        ),
    ],
)
def test_decoder_equals_transformers(
    hf_model: Callable[..., Any], assert_decoder_matches: Callable[..., None], overrides: Any
) -> None:
    assert_decoder_matches(hf_model("mixtral", **LONG | overrides))


@pytest.mark.slow
def test_engine_equals_transformers(
    hf_model: Callable[..., Any], assert_engine_matches: Callable[..., None]
) -> None:
    saved = hf_model("mixtral", **LONG, num_local_experts=7, num_experts_per_tok=3)
    assert_engine_matches(saved)


def test_published_config_is_translated() -> None:
    config = family_of(MIXTRAL_8X7B).translate(MIXTRAL_8X7B)
    assert config.moe == MoeConfig(8, 2, 14336, normalise=True)
    assert config.moe_layers == (True,) * 32
    assert config.windows == (0,) * 32
    assert (config.head_dim, config.num_kv_heads, config.ropes[0].theta) == (128, 8, 1e6)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"num_experts_per_tok": 9}, "num_experts_per_tok is 9; allowed is at most"),
        ({"num_local_experts": 0}, "num_local_experts is 0"),
        ({"num_local_experts": None}, "num_local_experts is None"),
        ({"expert_capacity": 64}, r"expert_capacity \(64\)"),
    ],
)
def test_config_that_is_not_understood_is_refused_by_key(change: Any, named: str) -> None:
    raw = MIXTRAL_8X7B | change
    with pytest.raises(ModelError, match=named):
        family_of(raw).translate(raw)
