"""Llama 2 and 3, and what is built like them: SmolLM2, TinyLlama."""

from typing import Any

from llmbuild.builder.models.config import DecoderConfig
from llmbuild.builder.models.config_reader import ConfigReader
from llmbuild.builder.models.families.common import GGUF_NAMES, HF_NAMES, IGNORED, read_decoder
from llmbuild.builder.models.families.family import Family


def translate(raw: dict[str, Any]) -> DecoderConfig:
    reader = ConfigReader(raw, "llama")
    reader.only("rope_interleaved", False)
    reader.only("is_llama_config", True)
    attention_bias = reader.boolean("attention_bias", False)
    return read_decoder(
        reader,
        qkv_bias=attention_bias,
        o_bias=attention_bias,
        mlp_bias=reader.boolean("mlp_bias", False),
    )


LLAMA = Family(
    name="llama",
    architectures=("LlamaForCausalLM",),
    translate=translate,
    hf_names=HF_NAMES,
    gguf_names=GGUF_NAMES,
    ignored=IGNORED,
    gguf_permuted_qk=True,
)
