"""GGUF files of the families whose projections lie otherwise there, made as llama.cpp's converter
makes them and named by the gguf package."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import gguf
import numpy as np
import pytest

from llmbuild.builder.checkpoint import open_checkpoint
from llmbuild.builder.checkpoint.base import TensorInfo
from llmbuild.builder.models.families import family_of
from llmbuild.builder.models.weights import ModelWeights

HEADS, HEAD_DIM = 6, 20
SHAPES: dict[str, dict[str, Any]] = {
    "exaone": {"head_dim": HEAD_DIM, "attention_bias": True},
    "gpt2": {"head_dim": HEAD_DIM, "num_key_value_heads": HEADS, "n_inner": 53},
    "gpt_neox": {"head_dim": HEAD_DIM, "num_key_value_heads": HEADS}
    | {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.3}},
    "starcoder2": {},
}
ARCHITECTURES = {
    "exaone": gguf.MODEL_ARCH.EXAONE,
    "gpt2": gguf.MODEL_ARCH.GPT2,
    "gpt_neox": gguf.MODEL_ARCH.GPTNEOX,
    "starcoder2": gguf.MODEL_ARCH.STARCODER2,
}


@dataclass
class MadeGguf:
    config: dict[str, Any]
    stored: dict[str, np.ndarray]
    format: str = "gguf"

    @property
    def tensors(self) -> dict[str, TensorInfo]:
        return {name: TensorInfo(tensor.shape, "F32") for name, tensor in self.stored.items()}

    def read(self, name: str) -> np.ndarray:
        return self.stored[name]


def _converted(model_type: str, name: str, tensor: np.ndarray) -> np.ndarray:
    if model_type == "gpt2" and name.endswith(("c_attn.weight", "c_proj.weight", "c_fc.weight")):
        return tensor.T
    if "query_key_value" in name:  # a head's query, key and value -> all queries, keys, values
        runs = np.split(tensor, 3 * HEADS)
        return np.concatenate(runs[0::3] + runs[1::3] + runs[2::3])
    return tensor


def _gguf_tensors(checkpoint: Any, model_type: str) -> Iterator[tuple[str, np.ndarray]]:
    names = gguf.get_tensor_name_map(ARCHITECTURES[model_type], 2)
    for name in checkpoint.tensors:
        renamed = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert renamed is not None, name
        yield renamed, _converted(model_type, name, checkpoint.read(name))


@pytest.mark.parametrize("model_type", SHAPES)
def test_a_gguf_holds_the_same_weights(hf_model: Callable[..., Any], model_type: str) -> None:
    checkpoint = open_checkpoint(hf_model(model_type, **SHAPES[model_type]).path)
    family = family_of(checkpoint.config)
    config = family.translate(checkpoint.config)
    made = MadeGguf(checkpoint.config, dict(_gguf_tensors(checkpoint, model_type)))
    ours, theirs = ModelWeights(made, family, config), ModelWeights(checkpoint, family, config)
    for name in theirs.names:
        np.testing.assert_array_equal(ours.read(name), theirs.read(name), err_msg=name)
