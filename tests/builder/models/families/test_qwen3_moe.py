"""Qwen3-MoE: held to transformers."""

from collections.abc import Callable
from typing import Any

import pytest

from llmbuild.builder.models.config import MoeConfig
from llmbuild.builder.models.families import family_of
from llmbuild.errors import ModelError

SMALL_MOE = {
    "experts_implementation": "eager",  # grouped_mm takes only rows of whole 16 bytes
    "max_position_embeddings": 64,
    "num_experts": 11,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 17,
}
QWEN3_30B_A3B = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "decoder_sparse_step": 1,
    "eos_token_id": 151645,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "initializer_range": 0.02,
    "intermediate_size": 6144,
    "max_position_embeddings": 40960,
    "max_window_layers": 48,
    "mlp_only_layers": [],
    "model_type": "qwen3_moe",
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "num_attention_heads": 32,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 48,
    "num_key_value_heads": 4,
    "output_router_logits": False,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000.0,
    "router_aux_loss_coef": 0.001,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.51.0",
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
}


@pytest.mark.parametrize(
    "overrides",
    [
        pytest.param({}, id="4 of 11"),
        pytest.param({"norm_topk_prob": True, "attention_bias": True}, id="normalised, biases"),
        pytest.param(
            {"num_experts": 67, "num_experts_per_tok": 1, "tie_word_embeddings": True},
            id="1 of 67, tied",
        ),
        pytest.param({"decoder_sparse_step": 2, "num_hidden_layers": 3}, id="every second layer"),
        pytest.param(
            {"mlp_only_layers": [1], "num_attention_heads": 3, "num_key_value_heads": 3},
            id="a dense layer, groups of 1",
        ),
        pytest.param(
            {"use_sliding_window": True, "sliding_window": 6}
            | {"num_attention_heads": 5, "num_key_value_heads": 1},
            id="window, one group",
        ),
    ],
)
def test_decoder_equals_transformers(
    hf_model: Callable[..., Any], assert_decoder_matches: Callable[..., None], overrides: Any
) -> None:
    assert_decoder_matches(hf_model("qwen3_moe", **SMALL_MOE | overrides))


@pytest.mark.slow
def test_engine_equals_transformers(
    hf_model: Callable[..., Any], assert_engine_matches: Callable[..., None]
) -> None:
    assert_engine_matches(hf_model("qwen3_moe", **SMALL_MOE, norm_topk_prob=True))


def test_published_config_is_translated() -> None:
    config = family_of(QWEN3_30B_A3B).translate(QWEN3_30B_A3B)
    assert config.moe == MoeConfig(128, 8, 768, normalise=True)
    assert config.moe_layers == (True,) * 48
    assert config.windows == (0,) * 48
    assert (config.head_dim, config.num_kv_heads, config.qk_norm) == (128, 4, "head")
    assert not config.qkv_bias


def test_number_of_experts_is_read_under_either_name() -> None:
    raw = {key: value for key, value in QWEN3_30B_A3B.items() if key != "num_experts"}
    config = family_of(raw).translate(raw | {"num_local_experts": 64})
    assert config.moe == MoeConfig(64, 8, 768, normalise=True)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"num_local_experts": 64}, r"num_experts \(128\)"),
        ({"num_experts_per_tok": 129}, "num_experts_per_tok is 129"),
        ({"use_sliding_window": True}, "sliding_window is None"),
        ({"use_sliding_window": True, "sliding_window": 4096}, r"max_window_layers \(48\)"),
        ({"routed_scaling_factor": 2.5}, r"routed_scaling_factor \(2.5\)"),
    ],
)
def test_config_that_is_not_understood_is_refused_by_key(change: Any, named: str) -> None:
    raw = QWEN3_30B_A3B | change
    with pytest.raises(ModelError, match=named):
        family_of(raw).translate(raw)
