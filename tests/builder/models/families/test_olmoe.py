"""OLMoE: held to transformers."""

from collections.abc import Callable
from typing import Any

import pytest

from llmbuild.builder.models.config import MoeConfig
from llmbuild.builder.models.families import family_of
from llmbuild.errors import ModelError

# Its norms over Q and K are as wide as the model, so head_dim is hidden_size / num_heads.
SMALL_MOE = {
    "head_dim": None,
    "experts_implementation": "eager",  # grouped_mm takes only rows of whole 16 bytes
    "max_position_embeddings": 64,
    "num_experts": 13,
    "num_experts_per_tok": 5,
    "pad_token_id": None,
    "eos_token_id": None,
}
OLMOE_1B_7B_0924 = {
    "architectures": ["OlmoeForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "clip_qkv": None,
    "eos_token_id": 50279,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "initializer_range": 0.02,
    "intermediate_size": 1024,
    "max_position_embeddings": 4096,
    "model_type": "olmoe",
    "norm_topk_prob": False,
    "num_attention_heads": 16,
    "num_experts": 64,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 16,
    "num_key_value_heads": 16,
    "output_router_logits": False,
    "pad_token_id": 1,
    "rope_scaling": None,
    "rope_theta": 10000.0,
    "router_aux_loss_coef": 0.01,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.43.0.dev0",
    "use_cache": True,
    "vocab_size": 50304,
}


@pytest.fixture
def olmoe(hf_model: Callable[..., Any]) -> Callable[..., Any]:
    def build(**overrides: Any) -> Any:
        values = SMALL_MOE | overrides
        heads = values.get("num_attention_heads", 6)
        return hf_model("olmoe", **values | {"head_dim": 120 // heads})

    return build


@pytest.mark.parametrize(
    "overrides",
    [
        pytest.param({}, id="5 of 13, groups of 3"),
        pytest.param({"norm_topk_prob": True, "attention_bias": True}, id="normalised, biases"),
        pytest.param(
            {"num_attention_heads": 3, "num_key_value_heads": 3, "tie_word_embeddings": True},
            id="groups of 1, tied",
        ),
        pytest.param(
            {"num_attention_heads": 5, "num_key_value_heads": 1, "num_experts": 67}
            | {"num_experts_per_tok": 1, "rms_norm_eps": 1e-2},
            id="one group, 1 of 67, large eps",
        ),
    ],
)
def test_decoder_equals_transformers(
    olmoe: Callable[..., Any], assert_decoder_matches: Callable[..., None], overrides: Any
) -> None:
    assert_decoder_matches(olmoe(**overrides))


@pytest.mark.slow
def test_engine_equals_transformers(
    olmoe: Callable[..., Any], assert_engine_matches: Callable[..., None]
) -> None:
    assert_engine_matches(olmoe(num_experts=67, num_experts_per_tok=8))


def test_published_config_is_translated() -> None:
    config = family_of(OLMOE_1B_7B_0924).translate(OLMOE_1B_7B_0924)
    assert config.moe == MoeConfig(64, 8, 1024)
    assert config.moe_layers == (True,) * 16
    assert (config.qk_norm, config.norm.eps, config.head_dim) == ("whole", 1e-5, 128)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"clip_qkv": 8.0}, "clip_qkv is 8.0; .* is not supported yet"),
        ({"num_experts_per_tok": 65}, "num_experts_per_tok is 65"),
        ({"router_z_loss": 0.1}, r"router_z_loss \(0.1\)"),
    ],
)
def test_config_that_is_not_understood_is_refused_by_key(change: Any, named: str) -> None:
    raw = OLMOE_1B_7B_0924 | change
    with pytest.raises(ModelError, match=named):
        family_of(raw).translate(raw)
