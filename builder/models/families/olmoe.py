"""OLMoE: an RMSNorm over the whole of Q and of K, and a mixture of experts in every layer."""

from typing import Any

from llmbuild.builder.models.config import DecoderConfig, NormConfig
from llmbuild.builder.models.config_reader import ConfigReader
from llmbuild.builder.models.families.common import IGNORED, read_decoder
from llmbuild.builder.models.families.family import Family
from llmbuild.builder.models.families.mixture import (
    EXPERTS_GGUF_NAMES,
    EXPERTS_HF_NAMES,
    every_layer,
    read_experts,
)

_DEFAULT_EPS = 1e-5


def translate(raw: dict[str, Any]) -> DecoderConfig:
    reader = ConfigReader(raw, "olmoe")
    clip = reader.optional_number("clip_qkv")
    if clip is not None:
        reader.refuse("clip_qkv", clip, "null; clipping Q, K and V is not supported yet")
    attention_bias = reader.boolean("attention_bias", False)
    normalise = reader.boolean("norm_topk_prob", False)
    return read_decoder(
        reader,
        norm=NormConfig(reader.number("rms_norm_eps", _DEFAULT_EPS)),
        qk_norm="whole",
        qkv_bias=attention_bias,
        o_bias=attention_bias,
        moe=read_experts(reader, "num_experts", "intermediate_size", normalise=normalise),
        moe_layers=every_layer(reader),
    )


OLMOE = Family(
    name="olmoe",
    architectures=("OlmoeForCausalLM",),
    translate=translate,
    hf_names=EXPERTS_HF_NAMES,
    gguf_names=EXPERTS_GGUF_NAMES,
    ignored=IGNORED,
    gguf_permuted_qk=False,
)
