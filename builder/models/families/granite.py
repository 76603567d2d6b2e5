"""Granite's dense models: a Llama with multipliers on embedding, attention, residual and logits."""

from typing import Any

from llmbuild.builder.models.config import DecoderConfig
from llmbuild.builder.models.config_reader import ConfigReader
from llmbuild.builder.models.families.common import GGUF_NAMES, HF_NAMES, IGNORED, read_decoder
from llmbuild.builder.models.families.family import Family


def translate(raw: dict[str, Any]) -> DecoderConfig:
    reader = ConfigReader(raw, "granite")
    return read_granite(reader, mlp_bias=reader.boolean("mlp_bias", False))


def read_granite(reader: ConfigReader, **features: Any) -> DecoderConfig:
    """read_decoder for configs with Granite's multipliers."""
    attention_bias = reader.boolean("attention_bias", False)
    return read_decoder(
        reader,
        attention_scale=reader.number("attention_multiplier", 1.0),
        embed_scale=reader.number("embedding_multiplier", 1.0),
        residual_scale=reader.number("residual_multiplier", 1.0),
        logit_scale=1 / reader.number("logits_scaling", 1.0),
        qkv_bias=attention_bias,
        o_bias=attention_bias,
        **features,
    )


GRANITE = Family(
    name="granite",
    architectures=("GraniteForCausalLM",),
    translate=translate,
    hf_names=HF_NAMES,
    gguf_names=GGUF_NAMES,
    ignored=IGNORED,
    gguf_permuted_qk=True,
)
