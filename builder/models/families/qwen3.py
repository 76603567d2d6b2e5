"""Qwen3: an RMSNorm over each head of Q and K, head_dim apart from hidden_size / num_heads."""

from typing import Any

from llmbuild.builder.models.config import DecoderConfig
from llmbuild.builder.models.config_reader import ConfigReader
from llmbuild.builder.models.families.common import (
    GGUF_NAMES,
    HF_NAMES,
    IGNORED,
    read_decoder,
    read_windows_by_layer,
)
from llmbuild.builder.models.families.family import Family


def translate(raw: dict[str, Any]) -> DecoderConfig:
    reader = ConfigReader(raw, "qwen3")
    # What transformers takes for these when they are left out is Qwen3 8B's own value.
    reader.require("num_key_value_heads", "head_dim")
    attention_bias = reader.boolean("attention_bias", False)
    return read_decoder(
        reader,
        qk_norm="head",
        qkv_bias=attention_bias,
        o_bias=attention_bias,
        windows=read_windows_by_layer(reader),
    )


QWEN3 = Family(
    name="qwen3",
    architectures=("Qwen3ForCausalLM",),
    translate=translate,
    hf_names=HF_NAMES,
    gguf_names=GGUF_NAMES,
    ignored=IGNORED,
    gguf_permuted_qk=False,
)
