"""GPT-NeoX and Pythia: held to transformers."""

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from llmbuild.builder.models.families import family_of
from llmbuild.errors import ModelError

# The fixture's head_dim and intermediate keys are Llama's; GPT-NeoX's heads are hidden / heads.
SHAPE = {"head_dim": 20, "num_key_value_heads": 6, "max_position_embeddings": 64}
PUBLISHED_PYTHIA_410M = {
    "architectures": ["GPTNeoXForCausalLM"],
    "bos_token_id": 0,
    "eos_token_id": 0,
    "hidden_act": "gelu",
    "hidden_size": 1024,
    "initializer_range": 0.02,
    "intermediate_size": 4096,
    "layer_norm_eps": 1e-05,
    "max_position_embeddings": 2048,
    "model_type": "gpt_neox",
    "num_attention_heads": 16,
    "num_hidden_layers": 24,
    "rotary_emb_base": 10000,
    "rotary_pct": 0.25,
    "tie_word_embeddings": False,
    "torch_dtype": "float16",
    "transformers_version": "4.24.0",
    "use_cache": True,
    "use_parallel_residual": True,
    "vocab_size": 50304,
}
PUBLISHED_NEOX_20B = {
    "architectures": ["GPTNeoXForCausalLM"],
    "attention_probs_dropout_prob": 0,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "hidden_act": "gelu_fast",
    "hidden_dropout_prob": 0,
    "hidden_size": 6144,
    "initializer_range": 0.02,
    "intermediate_size": 24576,
    "layer_norm_eps": 1e-05,
    "max_position_embeddings": 2048,
    "model_type": "gpt_neox",
    "num_attention_heads": 64,
    "num_hidden_layers": 44,
    "rotary_emb_base": 10000,
    "rotary_pct": 0.25,
    "tie_word_embeddings": False,
    "torch_dtype": "float16",
    "transformers_version": "4.19.0.dev0",
    "use_cache": True,
    "vocab_size": 50432,
}


def _rope(part: float, **more: Any) -> dict[str, Any]:
    rope = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": part}
    return {"rope_parameters": rope | more}


@pytest.mark.parametrize(
    "overrides",
    [
        _rope(0.3),
        {"use_parallel_residual": False, "tie_word_embeddings": True, **_rope(1.0)},
        {"attention_bias": False, "hidden_act": "gelu_fast", "num_attention_heads": 3}
        | _rope(0.25, rope_type="linear", factor=3.0)
        | {"head_dim": 40, "num_key_value_heads": 3},
    ],
    ids=["parallel", "sequential-tied", "no-attention-biases"],
)
def test_decoder_equals_transformers(
    hf_model: Callable[..., Any],
    assert_decoder_matches: Callable[..., None],
    overrides: dict[str, Any],
) -> None:
    assert_decoder_matches(hf_model("gpt_neox", **(SHAPE | overrides)))


def test_old_spellings_and_stored_masks_make_the_same_model(
    hf_model: Callable[..., Any], assert_decoder_matches: Callable[..., None]
) -> None:
    saved = hf_model("gpt_neox", **SHAPE, **_rope(0.3))
    config = saved.config
    del config["rope_parameters"]
    config |= {"rotary_pct": 0.3, "rotary_emb_base": 10000}
    (saved.path / "config.json").write_text(json.dumps(config))
    tensors = load_file(saved.path / "model.safetensors")
    mask = torch.ones(1, 1, 64, 64).tril().bool()
    buffers = {
        "bias": mask,
        "masked_bias": torch.tensor(-1e9),
        "rotary_emb.inv_freq": torch.ones(3),
    }
    for layer in range(2):
        for name, buffer in buffers.items():
            tensors[f"gpt_neox.layers.{layer}.attention.{name}"] = buffer.clone()
    save_file(tensors, saved.path / "model.safetensors")
    assert_decoder_matches(saved)


@pytest.mark.slow
def test_engine_equals_transformers_with_parallel_residuals(
    hf_model: Callable[..., Any], assert_engine_matches: Callable[..., None]
) -> None:
    assert_engine_matches(hf_model("gpt_neox", **SHAPE, **_rope(0.3)))


@pytest.mark.slow
def test_engine_equals_transformers_without_parallel_residuals(
    hf_model: Callable[..., Any], assert_engine_matches: Callable[..., None]
) -> None:
    assert_engine_matches(hf_model("gpt_neox", use_parallel_residual=False, **SHAPE, **_rope(0.3)))


def test_published_configs_translate() -> None:
    config = family_of(PUBLISHED_PYTHIA_410M).translate(PUBLISHED_PYTHIA_410M)
    assert (config.num_heads, config.num_kv_heads, config.head_dim) == (16, 16, 64)
    assert (config.ropes[0].rotary_dim, config.ropes[0].theta) == (16, 10_000)
    assert (config.parallel_residual, config.shared_norm) == (True, False)
    assert (config.activation, config.gated_mlp) == ("gelu", False)
    assert not config.tie_embeddings
    larger = family_of(PUBLISHED_NEOX_20B).translate(PUBLISHED_NEOX_20B)
    assert (larger.head_dim, larger.ropes[0].rotary_dim) == (96, 24)
    assert (larger.activation, larger.parallel_residual) == ("gelu_tanh", True)


def test_a_quarter_of_a_head_turns_when_the_config_does_not_say() -> None:
    config = {k: v for k, v in PUBLISHED_PYTHIA_410M.items() if k != "rotary_pct"}
    assert family_of(config).translate(config).ropes[0].rotary_dim == 16


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"partial_rotary_factor": 0.5}, "rotary_pct is 0.25, but partial_rotary_factor"),
        ({"use_parallel_residual": None}, "use_parallel_residual"),
        ({"alibi": True}, "alibi"),
    ],
)
def test_what_would_compute_something_else_is_refused(change: Any, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        family_of(PUBLISHED_PYTHIA_410M).translate(PUBLISHED_PYTHIA_410M | change)
