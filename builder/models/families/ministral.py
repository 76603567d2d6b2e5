"""Ministral 8B: Mistral with a window in some layers and full attention in the others."""

from typing import Any

from llmbuild.builder.models.config import DecoderConfig
from llmbuild.builder.models.config_reader import ConfigReader
from llmbuild.builder.models.families.common import (
    FULL,
    GGUF_NAMES,
    HF_NAMES,
    IGNORED,
    SLIDING,
    read_decoder,
    read_layer_types,
    windows_of,
)
from llmbuild.builder.models.families.family import Family


def translate(raw: dict[str, Any]) -> DecoderConfig:
    reader = ConfigReader(raw, "ministral")
    # What transformers takes for these when they are left out is one model's own value.
    reader.require("num_key_value_heads", "sliding_window")
    windowed = reader.optional_integer("sliding_window") is not None
    default = [SLIDING if windowed else FULL] * reader.integer("num_hidden_layers")
    return read_decoder(reader, windows=windows_of(reader, read_layer_types(reader, default)))


MINISTRAL = Family(
    name="ministral",
    architectures=("MinistralForCausalLM",),
    translate=translate,
    hf_names=HF_NAMES,
    # GGUF has no architecture of this name: as a Mistral it is a "llama", layout included.
    gguf_names=GGUF_NAMES,
    ignored=IGNORED,
    gguf_permuted_qk=True,
)
