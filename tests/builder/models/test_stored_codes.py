"""Codes that a GGUF file stores, by canonical name: rows in another order or of a fused tensor."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType as Type

from llmbuild.builder.checkpoint import open_checkpoint
from llmbuild.builder.checkpoint.base import TensorInfo
from llmbuild.builder.models.families import family_of
from llmbuild.builder.models.families.family import Part, Tensor
from llmbuild.builder.models.weights import ModelWeights
from llmbuild.quant.grid import WeightGrid

GRIDS = {
    Type.Q4_0: WeightGrid(4, 32, True),
    Type.Q4_1: WeightGrid(4, 32, False),
    Type.Q8_0: WeightGrid(8, 32, True),
}
# Every row is of whole blocks of 32.
SHAPE = {"hidden_size": 96, "intermediate_size": 64, "head_dim": 16, "vocab_size": 41}
SHAPE |= {"num_attention_heads": 6, "num_key_value_heads": 2}
MIXTURE = {"num_experts_per_tok": 2, "num_local_experts": 3, "experts_implementation": "eager"}
ROPE = {"rope_theta": 1e4, "rope_type": "default", "partial_rotary_factor": 0.5}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {},  # rows of Q and K in rotary pairs
    "llama, tied": {"tie_word_embeddings": True},
    "granite": {},
    "cohere": {},  # rotary pairs in every file
    "phi3": {"pad_token_id": 0, "eos_token_id": 1},  # Q, K and V fused, gate and up fused
    "gpt_neox": {"num_key_value_heads": 6, "rope_parameters": ROPE},  # fused, with biases
    "gpt2": {"num_key_value_heads": 6, "n_inner": 64},  # fused; a table of positions
    "mixtral": MIXTURE,
    "granitemoeshared": MIXTURE | {"shared_intermediate_size": 32},
}


def weights_of(path: Path) -> ModelWeights:
    checkpoint = open_checkpoint(path)
    family = family_of(checkpoint.config)
    return ModelWeights(checkpoint, family, family.translate(checkpoint.config))


@pytest.mark.parametrize("kind", GRIDS, ids=lambda kind: kind.name)
@pytest.mark.parametrize("model", MODELS)
def test_stored_codes_stand_for_the_very_values_that_are_read(
    hf_model: Callable[..., Any], write_gguf: Callable[..., Path], model: str, kind: Type
) -> None:
    saved = hf_model(model.split(",")[0], **(SHAPE | MODELS[model]))
    weights = weights_of(write_gguf(saved, kinds=[kind]))
    for name, shape in weights.names.items():
        expected = GRIDS[kind] if len(shape) > 1 else None
        assert weights.stored_grid(name) == expected, name
        if expected is None:
            continue
        matrix = weights.read_codes(name)
        assert (matrix.grid, matrix.codes.shape) == (expected, shape), name
        np.testing.assert_array_equal(matrix.dequantised(), weights.read(name), err_msg=name)
        if len(shape) == 3:
            part = weights.read_codes(name, (1, 3)).dequantised()
            np.testing.assert_array_equal(part, weights.read_rows(name, 1, 3), err_msg=name)


def test_each_part_of_a_fused_tensor_has_the_tensors_grid_and_others_their_own(
    hf_model: Callable[..., Any], write_gguf: Callable[..., Path]
) -> None:
    saved = hf_model("phi3", **(SHAPE | MODELS["phi3"]))
    weights = weights_of(write_gguf(saved, kinds=[*GRIDS, Type.F32, Type.Q5_1]))
    grids = {name: weights.stored_grid(name) for name in weights.names}
    assert {*GRIDS.values(), None} == set(grids.values())
    for layer in range(2):
        of_layer = {
            name.split(".")[-2]: grid for name, grid in grids.items() if f"rs.{layer}." in name
        }
        assert of_layer["q_proj"] == of_layer["k_proj"] == of_layer["v_proj"]
        assert of_layer["gate_proj"] == of_layer["up_proj"]


@pytest.mark.parametrize(
    ("width", "take", "has_grid"),
    [
        (96, lambda t: t[::-1], True),
        (96, lambda t: t.T, False),
        (96, lambda t: np.concatenate([t[:, 48:], t[:, :48]], axis=1), False),
        (192, lambda t: t[:, :96], False),
    ],
    ids=["rows turned round", "columns as rows", "columns moved", "half rows"],
)
def test_only_what_is_made_of_whole_stored_rows_has_a_stored_grid(
    hf_model: Callable[..., Any],
    write_gguf: Callable[..., Path],
    width: int,
    take: Callable[[Tensor], Tensor],
    has_grid: bool,
) -> None:
    """An o_proj [96, 96] taken from a stored [96, width]."""
    checkpoint = open_checkpoint(write_gguf(hf_model("llama", **SHAPE)))
    stored, grid = "blk.{l}.attn_output.weight", GRIDS[Type.Q8_0]
    changed = {stored.format(l=i): TensorInfo((96, width), "Q8_0", grid) for i in range(2)}
    checkpoint.tensors = {**checkpoint.tensors, **changed}
    family = family_of(checkpoint.config)
    part = Part(stored, lambda _: (96, width), lambda tensor, _: take(tensor))
    names = dict(family.gguf_names) | {"layers.{l}.attention.o_proj.weight": part}
    config = family.translate(checkpoint.config)
    weights = ModelWeights(checkpoint, replace(family, gguf_names=names), config)
    assert weights.stored_grid("layers.1.attention.o_proj.weight") == (grid if has_grid else None)


def test_safetensors_have_no_stored_grid(hf_model: Callable[..., Any]) -> None:
    weights = weights_of(hf_model("phi3", **(SHAPE | MODELS["phi3"])).path)
    assert {weights.stored_grid(name) for name in weights.names} == {None}
