"""GPT-2: held to transformers."""

from collections.abc import Callable
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from llmbuild.builder.models.families import family_of
from llmbuild.errors import ModelError

# n_inner beside the fixture's intermediate_size, and the heads that its other keys then allow
SHAPE = {"n_inner": 53, "head_dim": 20, "num_key_value_heads": 6, "max_position_embeddings": 43}
PUBLISHED_MEDIUM = {
    "activation_function": "gelu_new",
    "architectures": ["GPT2LMHeadModel"],
    "attn_pdrop": 0.1,
    "bos_token_id": 50256,
    "embd_pdrop": 0.1,
    "eos_token_id": 50256,
    "initializer_range": 0.02,
    "layer_norm_epsilon": 1e-05,
    "model_type": "gpt2",
    "n_ctx": 1024,
    "n_embd": 1024,
    "n_head": 16,
    "n_layer": 24,
    "n_positions": 1024,
    "n_special": 0,
    "predict_special_tokens": True,
    "resid_pdrop": 0.1,
    "summary_activation": None,
    "summary_first_dropout": 0.1,
    "summary_proj_to_labels": True,
    "summary_type": "cls_index",
    "summary_use_proj": True,
    "task_specific_params": {"text-generation": {"do_sample": True, "max_length": 50}},
    "vocab_size": 50257,
}


@pytest.mark.parametrize(
    "overrides",
    [
        {},
        {"tie_word_embeddings": False, "activation_function": "relu", "layer_norm_epsilon": 1e-2},
        {"num_attention_heads": 3, "head_dim": 40, "num_key_value_heads": 3},
    ],
    ids=["tied", "untied-relu", "three-heads"],
)
def test_decoder_equals_transformers(
    hf_model: Callable[..., Any],
    assert_decoder_matches: Callable[..., None],
    overrides: dict[str, Any],
) -> None:
    assert_decoder_matches(hf_model("gpt2", **(SHAPE | overrides)))


def test_a_checkpoint_of_the_bare_model_with_stored_masks_is_read(
    hf_model: Callable[..., Any], assert_decoder_matches: Callable[..., None]
) -> None:
    """As the first published GPT-2 files are."""
    saved = hf_model("gpt2", **SHAPE)
    path = saved.path / "model.safetensors"
    tensors = {n.removeprefix("transformer."): t for n, t in load_file(path).items()}
    for layer in range(2):
        tensors[f"h.{layer}.attn.bias"] = tensors["wte.weight"].new_ones(1, 1, 43, 43).tril()
    save_file(tensors, path)
    assert_decoder_matches(saved)


@pytest.mark.slow
def test_engine_equals_transformers(
    hf_model: Callable[..., Any], assert_engine_matches: Callable[..., None]
) -> None:
    assert_engine_matches(hf_model("gpt2", bos_token_id=1, eos_token_id=1, **SHAPE))


def test_published_config_translates() -> None:
    config = family_of(PUBLISHED_MEDIUM).translate(PUBLISHED_MEDIUM)
    assert (config.hidden_size, config.intermediate_size) == (1024, 4096)
    assert (config.num_layers, config.num_heads, config.head_dim) == (24, 16, 64)
    assert (config.max_position, config.learned_positions) == (1024, True)
    assert (config.ropes, set(config.layer_ropes)) == ((), {-1})
    assert (config.activation, config.gated_mlp, config.tie_embeddings) == (
        "gelu_tanh",
        False,
        True,
    )
    assert (config.norm.kind, config.norm.bias) == ("layer", True)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("scale_attn_weights", False),
        ("scale_attn_by_inverse_layer_idx", True),
        ("reorder_and_upcast_attn", True),
        ("add_cross_attention", True),
        ("n_ctx", 512),
        ("n_special", 1),
        ("activation_function", "quick_gelu"),
        ("rope_theta", 1e4),
    ],
)
def test_what_would_compute_something_else_is_refused(key: str, value: object) -> None:
    names = {"activation_function": "hidden_act"}
    with pytest.raises(ModelError, match=names.get(key, key)):
        family_of(PUBLISHED_MEDIUM).translate(PUBLISHED_MEDIUM | {key: value})


def test_two_spellings_that_disagree_are_refused() -> None:
    with pytest.raises(ModelError, match="n_embd is 1024, but hidden_size"):
        family_of(PUBLISHED_MEDIUM).translate(PUBLISHED_MEDIUM | {"hidden_size": 768})
