"""Qwen1.5-MoE and Qwen2-MoE: Qwen2 with experts, and an MLP that all tokens share, weighed by a
gate of its own."""

from typing import Any

from llmbuild.builder.models.config import DecoderConfig
from llmbuild.builder.models.config_reader import ConfigReader
from llmbuild.builder.models.families.common import IGNORED, read_decoder, read_windows_by_layer
from llmbuild.builder.models.families.family import Family
from llmbuild.builder.models.families.mixture import (
    EXPERTS_GGUF_NAMES,
    EXPERTS_HF_NAMES,
    read_experts,
    read_sparse_layers,
)

_MLP = "model.layers.{l}.mlp"


def translate(raw: dict[str, Any]) -> DecoderConfig:
    reader = ConfigReader(raw, "qwen2_moe")
    # What transformers takes for it when it is left out is Qwen1.5-MoE's own value.
    reader.require("num_key_value_heads")
    if reader.boolean("use_sliding_window", False):
        # Which layers slide has changed from one version of transformers to another.
        reader.require("layer_types")
    moe = read_experts(
        reader,
        "num_experts",
        "moe_intermediate_size",
        normalise=reader.boolean("norm_topk_prob", False),
        shared_size=reader.integer("shared_expert_intermediate_size"),
        shared_gate=True,
    )
    return read_decoder(
        reader,
        qkv_bias=reader.boolean("qkv_bias", True),
        windows=read_windows_by_layer(reader),
        moe=moe,
        moe_layers=read_sparse_layers(reader),
    )


QWEN2_MOE = Family(
    name="qwen2_moe",
    architectures=("Qwen2MoeForCausalLM",),
    translate=translate,
    hf_names=EXPERTS_HF_NAMES
    | {
        "layers.{l}.mlp.shared_gate.weight": f"{_MLP}.shared_expert_gate.weight",
        "layers.{l}.mlp.shared.gate_proj.weight": f"{_MLP}.shared_expert.gate_proj.weight",
        "layers.{l}.mlp.shared.up_proj.weight": f"{_MLP}.shared_expert.up_proj.weight",
        "layers.{l}.mlp.shared.down_proj.weight": f"{_MLP}.shared_expert.down_proj.weight",
    },
    gguf_names=EXPERTS_GGUF_NAMES,
    ignored=IGNORED,
    gguf_permuted_qk=False,
)
