"""Mistral 7B, and Nemo, whose heads are narrower than hidden_size / num_heads."""

from typing import Any

from llmbuild.builder.models.config import DecoderConfig
from llmbuild.builder.models.config_reader import ConfigReader
from llmbuild.builder.models.families.common import GGUF_NAMES, HF_NAMES, IGNORED, read_decoder
from llmbuild.builder.models.families.family import Family


def translate(raw: dict[str, Any]) -> DecoderConfig:
    reader = ConfigReader(raw, "mistral")
    # What transformers takes for these when they are left out is Mistral 7B's own value.
    reader.require("num_key_value_heads", "sliding_window")
    reader.only("attention_bias", False)
    reader.only("mlp_bias", False)
    window = reader.optional_integer("sliding_window") or 0
    return read_decoder(reader, windows=(window,) * reader.integer("num_hidden_layers"))


MISTRAL = Family(
    name="mistral",
    architectures=("MistralForCausalLM",),
    translate=translate,
    hf_names=HF_NAMES,
    # GGUF has no architecture of this name: a Mistral there is a "llama", layout included.
    gguf_names=GGUF_NAMES,
    ignored=IGNORED,
    gguf_permuted_qk=True,
)
