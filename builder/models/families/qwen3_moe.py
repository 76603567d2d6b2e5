"""Qwen3-MoE: Qwen3 with a mixture of experts."""

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


def translate(raw: dict[str, Any]) -> DecoderConfig:
    reader = ConfigReader(raw, "qwen3_moe")
    # What transformers takes for it when it is left out is Qwen3-30B-A3B's own value.
    reader.require("num_key_value_heads")
    attention_bias = reader.boolean("attention_bias", False)
    # Published configs say num_experts, those of later transformers num_local_experts.
    count_key = "num_local_experts" if "num_local_experts" in reader else "num_experts"
    normalise = reader.boolean("norm_topk_prob", False)
    return read_decoder(
        reader,
        qk_norm="head",
        qkv_bias=attention_bias,
        o_bias=attention_bias,
        windows=_read_windows(reader),
        moe=read_experts(reader, count_key, "moe_intermediate_size", normalise=normalise),
        moe_layers=read_sparse_layers(reader),
    )


def _read_windows(reader: ConfigReader) -> tuple[int, ...]:
    """A window is every layer's here, as transformers has it; max_window_layers, which says
    otherwise, is refused beside it."""
    if not reader.boolean("use_sliding_window", False):
        return read_windows_by_layer(reader)
    return (reader.integer("sliding_window"),) * reader.integer("num_hidden_layers")


QWEN3_MOE = Family(
    name="qwen3_moe",
    architectures=("Qwen3MoeForCausalLM",),
    translate=translate,
    hf_names=EXPERTS_HF_NAMES,
    gguf_names=EXPERTS_GGUF_NAMES,
    ignored=IGNORED,
    gguf_permuted_qk=False,
)
