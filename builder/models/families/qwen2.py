"""Qwen2 and Qwen2.5: biases on Q, K and V, windows by layer."""

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
    reader = ConfigReader(raw, "qwen2")
    # What transformers takes for it when it is left out is Qwen2 7B's own value.
    reader.require("num_key_value_heads")
    reader.only("attention_bias", True)
    reader.only("use_mrope", False)
    return read_decoder(reader, qkv_bias=True, windows=read_windows_by_layer(reader))


QWEN2 = Family(
    name="qwen2",
    architectures=("Qwen2ForCausalLM",),
    translate=translate,
    hf_names=HF_NAMES,
    gguf_names=GGUF_NAMES,
    ignored=IGNORED,
    gguf_permuted_qk=False,
)
