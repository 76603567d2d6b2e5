"""GGUF files of every architecture, written from random models: held to transformers."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from llmbuild.builder.checkpoint.gguf_architectures import ARCHITECTURES

LONG = {"max_position_embeddings": 64}
# The default, grouped_mm, takes only rows of whole 16 bytes.
MOE = {"num_experts_per_tok": 2, "experts_implementation": "eager"}
WINDOWED = {"num_hidden_layers": 4, "sliding_window": 7}
NO_HEAD_DIM = {"hidden_size": 84, "head_dim": 14}  # head_dim is hidden_size / heads
PLAIN = {"hidden_size": 84, "head_dim": None, "num_key_value_heads": None, "eos_token_id": 2}


def rotary(part: float) -> dict[str, Any]:
    rope = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": part}
    return {"rope_parameters": rope}


VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama-biased-tied": (
        "llama",
        {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
    ),
    "llama-yarn": (
        "llama",
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1e4,
                "factor": 4.0,
                "original_max_position_embeddings": 16,
            }
        },
    ),
    "mixtral": ("mixtral", MOE | {"num_local_experts": 5}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {}),
    "qwen2moe": (
        "qwen2_moe",
        MOE
        | {
            "num_experts": 5,
            "moe_intermediate_size": 29,
            "shared_expert_intermediate_size": 31,
            "norm_topk_prob": False,
        },
    ),
    "qwen3moe": (
        "qwen3_moe",
        MOE | {"num_experts": 5, "moe_intermediate_size": 29, "norm_topk_prob": True},
    ),
    "olmoe": ("olmoe", NO_HEAD_DIM | MOE | {"num_experts": 5, "eos_token_id": 2}),
    "gemma": ("gemma", {}),
    "gemma2": ("gemma2", WINDOWED | {"query_pre_attn_scalar": 14}),
    "gemma3": (
        "gemma3_text",
        WINDOWED
        | {
            "num_hidden_layers": 7,
            "query_pre_attn_scalar": 14,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "rope_theta": 1e5, "factor": 8.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
        },
    ),
    "phi3": (
        "phi3",
        NO_HEAD_DIM
        | {
            "sliding_window": 9,
            "pad_token_id": 0,
            "eos_token_id": 2,
        }
        | rotary(6 / 14),
    ),
    "phi3-longrope": (
        "phi3",
        NO_HEAD_DIM
        | {
            "pad_token_id": 0,
            "eos_token_id": 2,
            "original_max_position_embeddings": 20,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 1e4,
                "original_max_position_embeddings": 20,
                "short_factor": [1.0 + 0.25 * i for i in range(7)],
                "long_factor": [1.5 + 0.5 * i for i in range(7)],
            },
        },
    ),
    "granite": (
        "granite",
        NO_HEAD_DIM
        | {
            "attention_multiplier": 0.25,
            "embedding_multiplier": 6.0,
            "residual_multiplier": 0.5,
            "logits_scaling": 4.0,
        },
    ),
    "granitemoe": (
        "granitemoe",
        NO_HEAD_DIM | MOE | {"num_local_experts": 5, "attention_multiplier": 0.25},
    ),
    "granitemoeshared": (
        "granitemoeshared",
        NO_HEAD_DIM | MOE | {"num_local_experts": 5, "shared_intermediate_size": 31},
    ),
    "olmo2": ("olmo2", {"eos_token_id": 2}),
    "olmo3": ("olmo3", WINDOWED | {"num_hidden_layers": 5, "eos_token_id": 2}),
    "smollm3": ("smollm3", {"num_hidden_layers": 5, "pad_token_id": 0}),
    "command-r": ("cohere", {"logit_scale": 0.25, "eos_token_id": 2}),
    "cohere2": (
        "cohere2",
        WINDOWED | {"num_hidden_layers": 5, "logit_scale": 0.25, "eos_token_id": 2},
    ),
    "starcoder2": ("starcoder2", {"sliding_window": None, "eos_token_id": 2}),
    "gptneox": ("gpt_neox", PLAIN | rotary(6 / 14)),
    "gptneox-serial": (
        "gpt_neox",
        PLAIN | rotary(0.3) | {"use_parallel_residual": False},
    ),
    "gpt2": ("gpt2", PLAIN | {"bos_token_id": 1}),
    "exaone4": ("exaone4", WINDOWED | {"num_hidden_layers": 5}),
    "exaone4-full": ("exaone4", {"sliding_window": None, "layer_types": ["full_attention"] * 2}),
    "seed_oss": ("seed_oss", {"attention_out_bias": True}),
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_decoder_read_from_gguf_equals_transformers(
    hf_model: Callable[..., Any],
    write_gguf: Callable[..., Path],
    assert_decoder_matches: Callable[..., None],
    variant: str,
) -> None:
    model_type, overrides = VARIANTS[variant]
    saved = hf_model(model_type, **(LONG | overrides))
    assert_decoder_matches(saved, write_gguf(saved))


@pytest.mark.parametrize("form", ["exaone", "internlm2"])
def test_family_that_transformers_runs_as_a_llama_is_read_from_gguf(
    hf_model: Callable[..., Any],
    write_gguf: Callable[..., Path],
    assert_decoder_matches: Callable[..., None],
    form: str,
) -> None:
    saved = hf_model("llama", **(LONG | NO_HEAD_DIM))
    assert_decoder_matches(saved, write_gguf(saved, form))


def test_every_architecture_is_held_to_a_model() -> None:
    assert set(ARCHITECTURES) <= {*VARIANTS, "exaone", "internlm2"}
