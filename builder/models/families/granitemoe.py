"""Granite's mixture-of-experts models: each layer's experts lie in one stack."""

from typing import Any

from llmbuild.builder.models.config import DecoderConfig
from llmbuild.builder.models.config_reader import ConfigReader
from llmbuild.builder.models.families.common import HF_NAMES, IGNORED
from llmbuild.builder.models.families.family import Family, Source, StackedExperts
from llmbuild.builder.models.families.granite import read_granite
from llmbuild.builder.models.families.mixture import (
    EXPERTS_GGUF_NAMES,
    every_layer,
    read_experts,
)

_MOE = "model.layers.{l}.block_sparse_moe"

GRANITEMOE_HF_NAMES: dict[str, Source] = {
    **HF_NAMES,
    "layers.{l}.mlp.router.weight": f"{_MOE}.router.layer.weight",
    "layers.{l}.mlp.experts.gate_up": StackedExperts((f"{_MOE}.input_linear.weight",)),
    "layers.{l}.mlp.experts.down": StackedExperts((f"{_MOE}.output_linear.weight",)),
}


def translate(raw: dict[str, Any]) -> DecoderConfig:
    return read_granitemoe(ConfigReader(raw, "granitemoe"))


def read_granitemoe(reader: ConfigReader, **features: Any) -> DecoderConfig:
    """The config of either family; features: further fields of MoeConfig."""
    moe = read_experts(
        reader, "num_local_experts", "intermediate_size", scoring="top_k_softmax", **features
    )
    return read_granite(reader, moe=moe, moe_layers=every_layer(reader))


GRANITEMOE = Family(
    name="granitemoe",
    architectures=("GraniteMoeForCausalLM",),
    translate=translate,
    hf_names=GRANITEMOE_HF_NAMES,
    gguf_names=EXPERTS_GGUF_NAMES,
    ignored=IGNORED,
    gguf_permuted_qk=True,
)
