"""OLMo 2: norms after attention and MLP alone, and one over the whole of Q and of K."""

from typing import Any

from llmbuild.builder.models.config import DecoderConfig
from llmbuild.builder.models.config_reader import ConfigReader
from llmbuild.builder.models.families.common import GGUF_NAMES, HF_NAMES, IGNORED, read_decoder
from llmbuild.builder.models.families.family import Family


def translate(raw: dict[str, Any]) -> DecoderConfig:
    return read_olmo(ConfigReader(raw, "olmo2"))


def read_olmo(reader: ConfigReader, **features: Any) -> DecoderConfig:
    """What OLMo 2 and 3 share; features: read_decoder's."""
    if (clip := reader.optional_number("clip_qkv")) is not None:
        reader.refuse("clip_qkv", clip, "null, or leave it out: OLMo 1 alone clips")
    attention_bias = reader.boolean("attention_bias", False)
    return read_decoder(
        reader,
        qk_norm="whole",
        pre_norm=False,
        post_norm=True,
        qkv_bias=attention_bias,
        o_bias=attention_bias,
        **features,
    )


OLMO2 = Family(
    name="olmo2",
    architectures=("Olmo2ForCausalLM",),
    translate=translate,
    hf_names=HF_NAMES,
    gguf_names=GGUF_NAMES,
    ignored=IGNORED,
)
