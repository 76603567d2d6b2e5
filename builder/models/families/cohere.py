"""Cohere's Command-R and Aya: one LayerNorm before attention and MLP, which run side by side."""

from dataclasses import replace
from typing import Any

from llmbuild.builder.models.config import DecoderConfig, NormConfig
from llmbuild.builder.models.config_reader import ConfigReader
from llmbuild.builder.models.families.common import GGUF_NAMES, HF_NAMES, IGNORED, read_decoder
from llmbuild.builder.models.families.family import Family


def read_cohere(reader: ConfigReader, **features: Any) -> DecoderConfig:
    """The config record: what both generations have, and the features of one."""
    if reader.boolean("use_qk_norm", False):
        reader.refuse("use_qk_norm", True, "false; norms over Q and K are not supported yet")
    attention_bias = reader.boolean("attention_bias", False)
    # Early configs have a placeholder in max_position_embeddings, and the true length here.
    length = reader.optional_integer("model_max_length") or 0
    config = read_decoder(
        reader,
        norm=NormConfig(reader.number("layer_norm_eps"), kind="layer"),
        tied_by_default=True,
        parallel_residual=True,
        shared_norm=True,
        rope_interleaved=True,
        logit_scale=reader.number("logit_scale", 0.0625),
        qkv_bias=attention_bias,
        o_bias=attention_bias,
        **features,
    )
    return replace(config, max_position=max(config.max_position, length))


def translate(raw: dict[str, Any]) -> DecoderConfig:
    return read_cohere(ConfigReader(raw, "cohere"), default_theta=500_000.0)


COHERE = Family(
    name="cohere",
    architectures=("CohereForCausalLM",),
    translate=translate,
    hf_names=HF_NAMES,
    gguf_names=GGUF_NAMES,
    ignored=IGNORED,
)
