"""Quantised Hugging Face directories whatever their format: which are refused, what is told of
codes that can't be kept, and that a model's tensors come out of fused and of prefixed ones."""

import json
import tracemalloc
from contextlib import suppress

import numpy as np
import pytest
from hf_encoders import (
    gptq,
    of_module,
    pack_quantized,
    random_linear,
    rounded_linear,
    save_checkpoint,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file

from llmbuild.builder.checkpoint import open_checkpoint, stored_matrix
from llmbuild.builder.models.families import family_of
from llmbuild.builder.models.weights import ModelWeights
from llmbuild.errors import CheckpointError
from llmbuild.quant.grid import WeightGrid

CONFIG = {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": True}


def refused(directory, *words):
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(directory)
    for word in (str(directory), *words):
        assert word in str(caught.value)


@pytest.mark.parametrize(
    ("section", "words"),
    [
        ({"quant_method": "bitsandbytes"}, ["'bitsandbytes'", "gptq, awq, compressed-tensors"]),
        ({"quant_method": "fp8"}, ["'fp8'"]),
        ({"bits": 4}, ["quant_method None"]),
        ({"quant_method": ["gptq"]}, ["quant_method ['gptq']"]),
        ("gptq", ["quantization_config is 'gptq'", "object"]),
        ([], ["quantization_config is []"]),
    ],
    ids=str,
)
def test_another_method_is_refused_with_those_that_can_be_read(tmp_path, section, words):
    refused(save_checkpoint(tmp_path, {"a": np.ones(1, np.float32)}, section), *words)


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 9) | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=4,
)
METHODS = {
    "gptq": ("bits", "group_size", "sym", "dynamic", "checkpoint_format", "format", "desc_act"),
    "awq": ("bits", "group_size", "zero_point", "version", "backend", "modules_to_not_convert"),
    "compressed-tensors": ("format", "config_groups", "ignore", "kv_cache_scheme"),
}
WEIGHTS = ("num_bits", "type", "symmetric", "strategy", "group_size", "actorder", "dynamic")


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_a_config_of_anything_never_gives_another_error(data, tmp_path_factory):
    method = data.draw(st.sampled_from(sorted(METHODS)))
    section = data.draw(st.fixed_dictionaries({}, optional=dict.fromkeys(METHODS[method], VALUES)))
    if method == "compressed-tensors" and data.draw(st.booleans()):
        weights = st.fixed_dictionaries({}, optional=dict.fromkeys(WEIGHTS, VALUES))
        groups = {"weights": weights, "targets": st.just(["Linear"]), "format": VALUES}
        section["config_groups"] = {"g": data.draw(st.fixed_dictionaries({}, optional=groups))}
        section["format"] = data.draw(st.sampled_from(["pack-quantized", "mixed-precision"]))
    linear = random_linear(8, 32)
    tensors = of_module("a", pack_quantized(linear)) | of_module("b", gptq(linear, 2))
    directory = tmp_path_factory.mktemp("config")
    save_checkpoint(directory, tensors, section | {"quant_method": method})
    with suppress(CheckpointError):
        open_checkpoint(directory)


def test_parts_without_a_config_are_refused(tmp_path):
    tensors = of_module("a", gptq(random_linear(8, 32, symmetric=True)))
    save_checkpoint(tmp_path, tensors, None)
    refused(tmp_path, "config.json has no quantization_config", "a.qweight", "quantize_config.json")


def test_the_early_name_of_the_config_is_refused(tmp_path):
    save_checkpoint(tmp_path, {"a": np.ones(1, np.float32)}, None, compression_config={"a": 1})
    refused(tmp_path, "compression_config")


def test_a_config_of_null_is_none(tmp_path):
    save_checkpoint(tmp_path, {"a": np.ones(1, np.float32)}, None)
    checkpoint = open_checkpoint(tmp_path)
    assert checkpoint.notes == ()
    assert {info.grid for info in checkpoint.tensors.values()} == {None}


def test_codes_that_cannot_be_kept_are_counted_by_reason_and_kind(tmp_path):
    tensors = {}
    for layer in range(3):
        ordered = random_linear(8, 64, group_size=32, symmetric=True)
        parts = gptq(ordered)
        if layer:
            parts["g_idx"] = parts["g_idx"][::-1]
        tensors |= of_module(f"layers.{layer}.down_proj", parts)
        parts = gptq(random_linear(8, 64, group_size=32, symmetric=True, dtype=np.float32))
        tensors |= of_module(f"layers.{layer}.up_proj", parts)
    checkpoint = open_checkpoint(save_checkpoint(tmp_path, tensors, CONFIG))
    order, scales = sorted(checkpoint.notes)
    assert order.startswith("2 of 6 quantised weights")
    assert order.endswith("(activation order): 2 down_proj")
    assert scales.endswith("exactly: 3 up_proj")


def test_values_are_read_a_few_rows_at_a_time(tmp_path, monkeypatch):
    linear = random_linear(40, 96, group_size=32, symmetric=True)
    checkpoint = open_checkpoint(save_checkpoint(tmp_path, of_module("a", gptq(linear)), CONFIG))
    for items in (1, 7 * 96, 1 << 20):
        monkeypatch.setattr(stored_matrix, "_PART_ITEMS", items)
        np.testing.assert_array_equal(checkpoint.read("a.weight"), linear.values())


def test_reading_holds_little_beside_the_values(tmp_path):
    rows, columns = 1024, 2048
    rng = np.random.default_rng(0)
    parts = {
        "qweight": rng.integers(0, 1 << 31, (columns // 8, rows), dtype=np.int32),
        "qzeros": np.full((columns // 32, rows // 8), 0x77777777, np.int32),
        "scales": np.ones((columns // 32, rows), np.float16),
        "g_idx": (np.arange(columns) // 32).astype(np.int32),
    }
    checkpoint = open_checkpoint(save_checkpoint(tmp_path, of_module("a", parts), CONFIG))
    tracemalloc.start()
    try:
        values = checkpoint.read("a.weight")
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 1.5 * values.nbytes + (16 << 20)


def quantise_linears(path):
    """A saved model's linears as GPTQ, in place; returns their values by name."""
    tensors = load_file(path / "model.safetensors")
    config = json.loads((path / "config.json").read_text())
    values = {}
    for name in [name for name in tensors if name.endswith("_proj.weight")]:
        linear = rounded_linear(tensors.pop(name), group_size=32, symmetric=True)
        values[name] = linear.values()
        tensors |= of_module(name.removesuffix(".weight"), gptq(linear))
    save_checkpoint(path, tensors, CONFIG, **config)
    return values


SHAPE = {"hidden_size": 96, "intermediate_size": 64, "head_dim": 16, "vocab_size": 41}
SHAPE |= {"num_attention_heads": 6, "num_key_value_heads": 2}


@pytest.mark.parametrize(
    ("family", "config"),
    [("llama", {}), ("cohere", {}), ("phi3", {"pad_token_id": 0, "eos_token_id": 1})],
)
def test_codes_of_a_model_are_its_linears_fused_or_in_rotary_pairs(hf_model, family, config):
    saved = hf_model(family, **(SHAPE | config))
    stored = quantise_linears(saved.path)
    checkpoint = open_checkpoint(saved.path)
    of_family = family_of(checkpoint.config)
    weights = ModelWeights(checkpoint, of_family, of_family.translate(checkpoint.config))
    kept = {name for name in weights.names if name.endswith("_proj.weight")}
    total = 0
    for name in weights.names:
        grid = WeightGrid(4, 32, True) if name in kept else None
        if name.endswith("down_proj.weight"):
            assert weights.names[name] == (96, 64)
        assert weights.stored_grid(name) == grid, name
        if grid is not None:
            matrix = weights.read_codes(name)
            np.testing.assert_array_equal(matrix.dequantised(), weights.read(name), err_msg=name)
            total += matrix.size
    assert total == sum(values.size for values in stored.values())


@pytest.mark.parametrize("value", [0.0, 0.5])
def test_biases_of_zeros_that_the_model_lacks_are_left_out(hf_model, value):
    """AutoGPTQ gave each linear a bias."""
    saved = hf_model("llama", **SHAPE)
    quantise_linears(saved.path)
    tensors = load_file(saved.path / "model.safetensors")
    tensors["model.layers.0.mlp.up_proj.bias"] = np.full(64, value, np.float16)
    config = json.loads((saved.path / "config.json").read_text())
    save_checkpoint(saved.path, tensors, config.pop("quantization_config"), **config)
    checkpoint = open_checkpoint(saved.path)
    family = family_of(checkpoint.config)
    if value:
        with pytest.raises(CheckpointError, match=r"not part of the model: .*up_proj\.bias"):
            ModelWeights(checkpoint, family, family.translate(checkpoint.config))
    else:
        ModelWeights(checkpoint, family, family.translate(checkpoint.config))


def test_a_bare_models_names_are_understood(hf_model):
    """As a model is saved without its head's class: `wte.weight` for `transformer.wte.weight`."""
    saved = hf_model(
        "gpt2", **(SHAPE | {"num_key_value_heads": 6, "vocab_size": 48, "n_inner": 64})
    )
    tensors = load_file(saved.path / "model.safetensors")
    bare = {name.removeprefix("transformer."): values for name, values in tensors.items()}
    linear = rounded_linear(bare.pop("wte.weight"), group_size=32, symmetric=True)
    bare |= of_module("wte", gptq(linear))
    save_checkpoint(saved.path, bare, CONFIG, **saved.config)
    checkpoint = open_checkpoint(saved.path)
    family = family_of(checkpoint.config)
    weights = ModelWeights(checkpoint, family, family.translate(checkpoint.config))
    matrix = weights.read_codes("embed.weight")
    np.testing.assert_array_equal(matrix.dequantised(), linear.values())
