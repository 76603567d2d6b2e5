"""Seed-OSS: Llama with biases on Q, K and V."""

from typing import Any

from llmbuild.builder.models.config import DecoderConfig
from llmbuild.builder.models.config_reader import ConfigReader
from llmbuild.builder.models.families.common import GGUF_NAMES, HF_NAMES, IGNORED, read_decoder
from llmbuild.builder.models.families.family import Family


def translate(raw: dict[str, Any]) -> DecoderConfig:
    reader = ConfigReader(raw, "seed_oss")
    # What transformers takes for these when they are left out is Seed-OSS 36B's own value.
    reader.require("num_key_value_heads", "head_dim")
    return read_decoder(
        reader,
        qkv_bias=reader.boolean("attention_bias", True),
        o_bias=reader.boolean("attention_out_bias", False),
        mlp_bias=reader.boolean("mlp_bias", False),
    )


SEED_OSS = Family(
    name="seed_oss",
    architectures=("SeedOssForCausalLM",),
    translate=translate,
    hf_names=HF_NAMES,
    gguf_names=GGUF_NAMES | {"layers.{l}.mlp_norm.weight": "blk.{l}.post_attention_norm.weight"},
    ignored=IGNORED,
)
