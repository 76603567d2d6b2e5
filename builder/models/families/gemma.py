"""Gemma: norms that apply 1 + w, scaled embeddings, heads apart from hidden_size / num_heads."""

from typing import Any

from llmbuild.builder.models.config import DecoderConfig, NormConfig
from llmbuild.builder.models.config_reader import ConfigReader
from llmbuild.builder.models.families.common import GGUF_NAMES, HF_NAMES, IGNORED, read_decoder
from llmbuild.builder.models.families.family import Family

_GELU_TANH = "gelu_pytorch_tanh"
_NULLABLE = ("hidden_activation", "use_bidirectional_attention")  # null says what absence does


def open_gemma(raw: dict[str, Any], family: str) -> ConfigReader:
    """A reader of any Gemma's config, less what is null and may be."""
    given = {key: value for key, value in raw.items() if value is not None or key not in _NULLABLE}
    return ConfigReader(given, family)


def read_gemma(reader: ConfigReader, **features: Any) -> DecoderConfig:
    """The config record: what every Gemma has, and the features of a generation."""
    # What transformers takes for these when they are left out is one Gemma's own value.
    reader.require("num_key_value_heads", "head_dim")
    reader.only("use_bidirectional_attention", False)
    # The first Gemma was published with "gelu", which transformers reads as its approximation.
    reader.text("hidden_act", (_GELU_TANH, "gelu"))
    reader.only("hidden_activation", _GELU_TANH)
    attention_bias = reader.boolean("attention_bias", False)
    return read_decoder(
        reader,
        norm=NormConfig(reader.number("rms_norm_eps"), plus_one=True),
        activation="gelu_tanh",
        tied_by_default=True,
        embed_scale=reader.integer("hidden_size") ** 0.5,
        qkv_bias=attention_bias,
        o_bias=attention_bias,
        **features,
    )


def translate(raw: dict[str, Any]) -> DecoderConfig:
    return read_gemma(open_gemma(raw, "gemma"))


GEMMA = Family(
    name="gemma",
    architectures=("GemmaForCausalLM",),
    translate=translate,
    hf_names=HF_NAMES,
    gguf_names=GGUF_NAMES,
    ignored=IGNORED,
    gguf_adds_one=True,
)
