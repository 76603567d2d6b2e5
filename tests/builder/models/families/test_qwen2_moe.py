"""Qwen1.5-MoE and Qwen2-MoE: held to transformers."""

from collections.abc import Callable
from typing import Any

import pytest

from llmbuild.builder.models.config import MoeConfig
from llmbuild.builder.models.families import family_of
from llmbuild.errors import ModelError

SMALL_MOE = {
    "experts_implementation": "eager",  # grouped_mm takes only rows of whole 16 bytes
    "max_position_embeddings": 64,
    "num_experts": 7,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 19,
    "shared_expert_intermediate_size": 23,
}
QWEN15_MOE_A27B = {
    "architectures": ["Qwen2MoeForCausalLM"],
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "decoder_sparse_step": 1,
    "eos_token_id": 151643,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "initializer_range": 0.02,
    "intermediate_size": 5632,
    "max_position_embeddings": 8192,
    "max_window_layers": 21,
    "model_type": "qwen2_moe",
    "moe_intermediate_size": 1408,
    "norm_topk_prob": False,
    "num_attention_heads": 16,
    "num_experts": 60,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 24,
    "num_key_value_heads": 16,
    "output_router_logits": False,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "router_aux_loss_coef": 0.001,
    "shared_expert_intermediate_size": 5632,
    "sliding_window": 32768,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.39.0.dev0",
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
QWEN2_57B_A14B = QWEN15_MOE_A27B | {
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "max_position_embeddings": 131072,
    "max_window_layers": 28,
    "moe_intermediate_size": 2560,
    "num_attention_heads": 28,
    "num_experts": 64,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 28,
    "num_key_value_heads": 4,
    "shared_expert_intermediate_size": 20480,
    "sliding_window": 65536,
}


@pytest.mark.parametrize(
    "overrides",
    [
        pytest.param({}, id="3 of 7"),
        pytest.param({"norm_topk_prob": True, "qkv_bias": False}, id="normalised, no biases"),
        pytest.param({"decoder_sparse_step": 2, "num_hidden_layers": 4}, id="every second layer"),
        pytest.param({"mlp_only_layers": [0, 2], "num_hidden_layers": 3}, id="two dense layers"),
        pytest.param({"mlp_only_layers": [0, 1]}, id="dense layers alone"),
        pytest.param(
            {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 2}
            | {"num_hidden_layers": 3, "num_attention_heads": 5, "num_key_value_heads": 1},
            id="window in some layers, one group",
        ),
        pytest.param(
            {"tie_word_embeddings": True, "num_attention_heads": 3, "num_key_value_heads": 3},
            id="tied, groups of 1",
        ),
    ],
)
def test_decoder_equals_transformers(
    hf_model: Callable[..., Any], assert_decoder_matches: Callable[..., None], overrides: Any
) -> None:
    assert_decoder_matches(hf_model("qwen2_moe", **SMALL_MOE | overrides))


@pytest.mark.slow
def test_engine_equals_transformers(
    hf_model: Callable[..., Any], assert_engine_matches: Callable[..., None]
) -> None:
    assert_engine_matches(hf_model("qwen2_moe", **SMALL_MOE, mlp_only_layers=[0]))


@pytest.mark.slow
def test_engine_with_a_window_equals_transformers(
    hf_model: Callable[..., Any], assert_engine_matches: Callable[..., None]
) -> None:
    window = {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1}
    assert_engine_matches(hf_model("qwen2_moe", **SMALL_MOE | window, norm_topk_prob=True))


def test_published_configs_are_translated() -> None:
    config = family_of(QWEN15_MOE_A27B).translate(QWEN15_MOE_A27B)
    assert config.moe == MoeConfig(60, 4, 1408, shared_size=5632, shared_gate=True)
    assert config.moe_layers == (True,) * 24
    assert config.windows == (0,) * 24
    assert (config.qkv_bias, config.o_bias, config.head_dim) == (True, False, 128)
    config = family_of(QWEN2_57B_A14B).translate(QWEN2_57B_A14B)
    assert config.moe == MoeConfig(64, 8, 2560, shared_size=20480, shared_gate=True)
    assert (config.num_kv_heads, config.intermediate_size) == (4, 18944)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"num_experts_per_tok": 61}, "num_experts_per_tok is 61; allowed is at most"),
        ({"num_experts": 0}, "num_experts is 0"),
        ({"mlp_only_layers": [-1]}, r"mlp_only_layers is \[-1\]"),
        ({"mlp_only_layers": [True]}, r"mlp_only_layers is \[True\]"),
        ({"mlp_only_layers": 3}, "mlp_only_layers is 3"),
        ({"decoder_sparse_step": 0}, "decoder_sparse_step is 0"),
        ({"norm_topk_prob": None}, "norm_topk_prob is None"),
        ({"use_sliding_window": True}, "lacks layer_types"),
        ({"n_group": 4}, r"n_group \(4\)"),
    ],
)
def test_config_that_is_not_understood_is_refused_by_key(change: Any, named: str) -> None:
    raw = QWEN15_MOE_A27B | change
    with pytest.raises(ModelError, match=named):
        family_of(raw).translate(raw)
