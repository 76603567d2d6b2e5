"""Weights that no grid holds are named as what is wrong, not what calibration found with them."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from bench import random_model
from bench.cases import Shape
from llmbuild.builder.compile import compile
from llmbuild.errors import UserError

NAME = "layers.0.attention.q_proj.weight"


def save_recipe(folder: Path, target: str, precision: str, value: float) -> Path:
    """A tiny Llama with one value of layer 0's q_proj replaced, and a recipe of it."""
    random_model.write(Shape("tiny", 64, 96, 4, 2, 16, vocab=300, layers=1), folder / "model")
    weights = load_file(folder / "model" / "model.safetensors")
    weights = {name: tensor.clone() for name, tensor in weights.items()}
    weights["model.layers.0.self_attn.q_proj.weight"][3, 2] = torch.tensor(value)
    save_file(weights, folder / "model" / "model.safetensors", metadata={"format": "pt"})
    (folder / "text.txt").write_text("Calibrate with these words, which are enough. " * 4)
    recipe = folder / "recipe.yaml"
    recipe.write_text(
        f"version: 1\nname: tiny\nmodel: {{source: 'path:model'}}\ntarget: {target}\n"
        f"precision: {precision}\ncalibration: {{data: text.txt, sequences: 2, length: 32}}\n"
        "limits: {max_sequence_length: 64, max_step_tokens: 32, max_sequences: 2}\n"
    )
    return recipe


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e30])
@pytest.mark.parametrize(
    ("target", "precision", "scheme"),
    [("cpu", "bf16", "w8a8-static"), ("tensorrt-rtx", "fp16", "fp8_w8a8")],
)
def test_a_weight_that_is_no_number_or_far_too_large_is_named(
    tmp_path: Path, target: str, precision: str, scheme: str, value: float
) -> None:
    recipe = save_recipe(tmp_path, target, precision, value)
    with pytest.raises(UserError, match=NAME) as told:
        compile(recipe, tmp_path / "engine", [f"quantisation={scheme}"])
    assert "activations" not in str(told.value)
    assert not (tmp_path / "engine").exists()


@pytest.mark.parametrize("scheme", ["w8a16", "fp8_w8a8"])
def test_a_quantised_weight_beyond_fp16_is_named(tmp_path: Path, scheme: str) -> None:
    recipe = save_recipe(tmp_path, "tensorrt-rtx", "fp16", 1e5)
    with pytest.raises(UserError, match=rf"{NAME} holds 9.98.e\+04, .*choose bf16"):
        compile(recipe, tmp_path / "engine", [f"quantisation={scheme}"])
