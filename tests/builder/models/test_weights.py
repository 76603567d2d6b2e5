"""Names and shapes of a checkpoint's tensors against transformers, and what is refused."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import MODEL_ARCH, get_tensor_name_map

from llmbuild.builder.checkpoint import open_checkpoint
from llmbuild.builder.models.canonical import expected_tensors
from llmbuild.builder.models.config import DecoderConfig, NormConfig, RopeConfig
from llmbuild.builder.models.families import FAMILIES, Family, family_of
from llmbuild.builder.models.weights import ModelWeights
from llmbuild.errors import CheckpointError

VARIANTS = [
    ("llama", {}),
    ("llama", {"attention_bias": True, "mlp_bias": True}),
    ("llama", {"tie_word_embeddings": True}),
    ("mistral", {}),
    ("qwen2", {}),
    ("qwen3", {}),
    ("qwen3", {"attention_bias": True, "tie_word_embeddings": True}),
]


def weights_of(checkpoint: Any) -> ModelWeights:
    family = family_of(checkpoint.config)
    return ModelWeights(checkpoint, family, family.translate(checkpoint.config))


def canonical_to_hf(family: Family, name: str) -> str:
    parts = name.split(".")
    if parts[0] != "layers":
        return family.hf_names[name]
    return family.hf_names[".".join(["layers", "{l}", *parts[2:]])].replace("{l}", parts[1])


@pytest.mark.parametrize(("family", "overrides"), VARIANTS)
def test_every_tensor_of_the_model_is_read_under_one_canonical_name(
    hf_model: Callable[..., Any], family: str, overrides: dict[str, Any]
) -> None:
    saved = hf_model(family, **overrides)
    weights = weights_of(open_checkpoint(saved.path))
    state = saved.model.state_dict()
    if overrides.get("tie_word_embeddings"):
        del state["lm_head.weight"]
    for name, shape in weights.names.items():
        theirs = state.pop(canonical_to_hf(family_of(saved.config), name)).numpy()
        assert theirs.shape == shape
        np.testing.assert_array_equal(weights.read(name), theirs)
    assert state == {}


def test_missing_leftover_and_misshapen_tensors_are_all_named(
    hf_model: Callable[..., Any], in_memory: Callable[..., Any]
) -> None:
    checkpoint = in_memory(hf_model("llama"))
    stored = checkpoint.stored
    del stored["model.layers.1.mlp.up_proj.weight"], stored["model.norm.weight"]
    stored["model.layers.0.self_attn.q_proj.bias"] = np.zeros(84, np.float32)
    stored["model.layers.2.input_layernorm.weight"] = np.zeros(120, np.float32)
    stored["model.layers.0.self_attn.k_proj.weight"] = np.zeros((120, 28), np.float32)
    with pytest.raises(CheckpointError) as caught:
        weights_of(checkpoint)
    message = str(caught.value)
    missing, leftover, misshapen = (part.split(": ", 1)[1] for part in message.split("; ")[1:])
    assert missing == "model.layers.1.mlp.up_proj.weight (53, 120), model.norm.weight (120,)"
    assert leftover == (
        "model.layers.0.self_attn.q_proj.bias, model.layers.2.input_layernorm.weight"
    )
    assert misshapen.startswith(
        "model.layers.0.self_attn.k_proj.weight: shape is (120, 28), the config calls for (28, 120)"
    )


def test_no_tensor_is_read_to_check_names_and_shapes(
    hf_model: Callable[..., Any], in_memory: Callable[..., Any]
) -> None:
    checkpoint = in_memory(hf_model("qwen3"))
    weights_of(checkpoint)
    assert checkpoint.reads == []


def test_missing_head_of_an_untied_model_is_named(
    hf_model: Callable[..., Any], in_memory: Callable[..., Any]
) -> None:
    checkpoint = in_memory(hf_model("qwen2"))
    del checkpoint.stored["lm_head.weight"]
    with pytest.raises(CheckpointError, match=r"missing: lm_head.weight \(97, 120\)"):
        weights_of(checkpoint)


def test_head_in_a_tied_checkpoint_is_dropped_when_it_repeats_the_embedding(
    hf_model: Callable[..., Any], in_memory: Callable[..., Any]
) -> None:
    checkpoint = in_memory(hf_model("llama", tie_word_embeddings=True))
    assert "lm_head.weight" not in checkpoint.stored
    checkpoint.stored["lm_head.weight"] = checkpoint.stored["model.embed_tokens.weight"].copy()
    assert "lm_head.weight" not in weights_of(checkpoint).names


@pytest.mark.parametrize("alter", ["one value", "a row fewer"])
def test_head_in_a_tied_checkpoint_is_refused_when_it_differs_from_the_embedding(
    hf_model: Callable[..., Any], in_memory: Callable[..., Any], alter: str
) -> None:
    checkpoint = in_memory(hf_model("llama", tie_word_embeddings=True))
    head = checkpoint.stored["model.embed_tokens.weight"].copy()
    if alter == "one value":
        head[-1, -1] = np.nextafter(head[-1, -1], np.float32(9))
    checkpoint.stored["lm_head.weight"] = head if alter == "one value" else head[:-1]
    with pytest.raises(CheckpointError, match=r"lm_head.weight differs from model.embed_tokens"):
        weights_of(checkpoint)


def test_stored_rotary_frequencies_are_dropped_only_for_layers_that_exist(
    hf_model: Callable[..., Any], in_memory: Callable[..., Any]
) -> None:
    checkpoint = in_memory(hf_model("llama"))
    stored = "model.layers.{}.self_attn.rotary_emb.inv_freq"
    checkpoint.stored[stored.format(1)] = np.zeros(7, np.float32)
    weights_of(checkpoint)
    checkpoint.stored[stored.format(2)] = np.zeros(7, np.float32)
    with pytest.raises(CheckpointError, match=f"not part of the model: {stored.format(2)}"):
        weights_of(checkpoint)


@pytest.mark.parametrize(
    ("family", "overrides"), [variant for variant in VARIANTS if variant[0] != "mistral"]
)
def test_gguf_file_gives_the_tensors_of_the_directory_it_was_made_from(
    hf_model: Callable[..., Any],
    write_gguf: Callable[..., Path],
    family: str,
    overrides: dict[str, Any],
) -> None:
    saved = hf_model(family, **overrides)
    ours = weights_of(open_checkpoint(write_gguf(saved)))
    expected = weights_of(open_checkpoint(saved.path))
    assert ours.names == expected.names
    for name in ours.names:
        np.testing.assert_array_equal(ours.read(name), expected.read(name), err_msg=name)


def test_gguf_name_maps_agree_with_the_gguf_library() -> None:
    arch = {"llama": MODEL_ARCH.LLAMA, "qwen2": MODEL_ARCH.QWEN2, "qwen3": MODEL_ARCH.QWEN3}
    for family in FAMILIES:
        if family.name not in arch:
            continue  # their tests compare whole files
        names = get_tensor_name_map(arch[family.name], 2)
        qk_norm = family.name == "qwen3"
        for canonical, hf in family.hf_names.items():
            if not qk_norm and ("q_norm" in canonical or "k_norm" in canonical):
                continue
            if "post_norm" in canonical:
                continue  # of other families, which share the map
            theirs = names.get_name(hf.format(l=1), try_suffixes=(".weight", ".bias"))
            assert theirs == family.gguf_names[canonical].format(l=1)


@pytest.mark.parametrize("bias", [False, True])
def test_expected_shapes_follow_the_config_record(bias: bool) -> None:
    config = DecoderConfig(
        family="llama",
        vocab_size=11,
        hidden_size=6,
        intermediate_size=7,
        num_layers=1,
        num_heads=3,
        num_kv_heads=1,
        head_dim=4,
        norm=NormConfig(1e-5),
        ropes=(RopeConfig("default", 1e4, 4),),
        layer_ropes=(0,),
        attention_scale=0.5,
        max_position=8,
        tie_embeddings=True,
        qk_norm="head",
        qkv_bias=bias,
        o_bias=False,
        mlp_bias=False,
        windows=(0,),
    )
    shapes = expected_tensors(config)
    biases = {name: shape for name, shape in shapes.items() if name.endswith(".bias")}
    per_head = {"layers.0.attention.q_proj.bias": (12,), "layers.0.attention.k_proj.bias": (4,)}
    assert biases == ((per_head | {"layers.0.attention.v_proj.bias": (4,)}) if bias else {})
    assert shapes["layers.0.attention.o_proj.weight"] == (6, 12)
    assert shapes["layers.0.attention.q_norm.weight"] == (4,)
    assert shapes["layers.0.mlp.down_proj.weight"] == (6, 7)
    assert len(shapes) == 2 + 11 + len(biases)
