"""Granite's mixture of experts with an MLP that all tokens share besides."""

from typing import Any

from llmbuild.builder.models.config import DecoderConfig
from llmbuild.builder.models.config_reader import ConfigReader
from llmbuild.builder.models.families.common import IGNORED
from llmbuild.builder.models.families.family import Family, Part, Shape, Tensor
from llmbuild.builder.models.families.granitemoe import GRANITEMOE_HF_NAMES, read_granitemoe
from llmbuild.builder.models.families.mixture import EXPERTS_GGUF_NAMES

_SHARED = "model.layers.{l}.shared_mlp"


def translate(raw: dict[str, Any]) -> DecoderConfig:
    reader = ConfigReader(raw, "granitemoeshared")
    size = reader.optional_integer("shared_intermediate_size", minimum=0) or 0
    return read_granitemoe(reader, shared_size=size)


def _gate_up_shape(config: DecoderConfig) -> Shape:
    return 2 * _shared_size(config), config.hidden_size


def _gate(tensor: Tensor, config: DecoderConfig) -> Tensor:
    return tensor[: _shared_size(config)]


def _up(tensor: Tensor, config: DecoderConfig) -> Tensor:
    return tensor[_shared_size(config) :]


def _shared_size(config: DecoderConfig) -> int:
    assert config.moe is not None
    return config.moe.shared_size


GRANITEMOESHARED = Family(
    name="granitemoeshared",
    architectures=("GraniteMoeSharedForCausalLM",),
    translate=translate,
    hf_names=GRANITEMOE_HF_NAMES
    | {
        "layers.{l}.mlp.shared.gate_proj.weight": Part(
            f"{_SHARED}.input_linear.weight", _gate_up_shape, _gate
        ),
        "layers.{l}.mlp.shared.up_proj.weight": Part(
            f"{_SHARED}.input_linear.weight", _gate_up_shape, _up
        ),
        "layers.{l}.mlp.shared.down_proj.weight": f"{_SHARED}.output_linear.weight",
    },
    gguf_names=EXPERTS_GGUF_NAMES,
    ignored=IGNORED,
    gguf_permuted_qk=True,
)
