"""Mixtral: Mistral with a mixture of experts in every layer."""

from typing import Any

from llmbuild.builder.models.config import DecoderConfig
from llmbuild.builder.models.config_reader import ConfigReader
from llmbuild.builder.models.families.common import HF_NAMES, IGNORED, read_decoder
from llmbuild.builder.models.families.family import Experts, Family
from llmbuild.builder.models.families.mixture import (
    EXPERTS_GGUF_NAMES,
    every_layer,
    read_experts,
)

_DEFAULT_THETA = 1e6
_MOE = "model.layers.{l}.block_sparse_moe"


def translate(raw: dict[str, Any]) -> DecoderConfig:
    reader = ConfigReader(raw, "mixtral")
    # What transformers takes for it when it is left out is Mixtral 8x7B's own value.
    reader.require("num_key_value_heads")
    window = reader.optional_integer("sliding_window") or 0
    return read_decoder(
        reader,
        windows=(window,) * reader.integer("num_hidden_layers"),
        default_theta=_DEFAULT_THETA,
        moe=read_experts(reader, "num_local_experts", "intermediate_size", normalise=True),
        moe_layers=every_layer(reader),
    )


MIXTRAL = Family(
    name="mixtral",
    architectures=("MixtralForCausalLM",),
    translate=translate,
    hf_names=HF_NAMES
    | {
        "layers.{l}.mlp.router.weight": f"{_MOE}.gate.weight",
        "layers.{l}.mlp.experts.gate_up": Experts(
            (f"{_MOE}.experts.{{e}}.w1.weight", f"{_MOE}.experts.{{e}}.w3.weight")
        ),
        "layers.{l}.mlp.experts.down": Experts((f"{_MOE}.experts.{{e}}.w2.weight",)),
    },
    # GGUF has no architecture of this name: a Mixtral there is a "llama" with experts.
    gguf_names=EXPERTS_GGUF_NAMES,
    ignored=IGNORED,
    gguf_permuted_qk=True,
)
