"""Gemma 2: norms on both sides of attention and MLP, soft caps, every other layer a window."""

from typing import Any

from llmbuild.builder.models.config import DecoderConfig
from llmbuild.builder.models.families.common import (
    GGUF_NAMES,
    HF_NAMES,
    IGNORED,
    read_windows_by_pattern,
)
from llmbuild.builder.models.families.family import Family
from llmbuild.builder.models.families.gemma import open_gemma, read_gemma

SANDWICH_HF_NAMES = HF_NAMES | {
    "layers.{l}.attn_post_norm.weight": "model.layers.{l}.post_attention_layernorm.weight",
    "layers.{l}.mlp_norm.weight": "model.layers.{l}.pre_feedforward_layernorm.weight",
    "layers.{l}.mlp_post_norm.weight": "model.layers.{l}.post_feedforward_layernorm.weight",
}
SANDWICH_GGUF_NAMES = GGUF_NAMES | {
    "layers.{l}.attn_post_norm.weight": "blk.{l}.post_attention_norm.weight",
    "layers.{l}.mlp_post_norm.weight": "blk.{l}.post_ffw_norm.weight",
}


def translate(raw: dict[str, Any]) -> DecoderConfig:
    reader = open_gemma(raw, "gemma2")
    # What transformers takes for these when they are left out is Gemma 2 2B's own value.
    reader.require("query_pre_attn_scalar", "attn_logit_softcapping", "final_logit_softcapping")
    reader.only("sliding_window_pattern", 2)
    return read_gemma(
        reader,
        post_norm=True,
        windows=read_windows_by_pattern(reader, 2),
        attention_scale=reader.number("query_pre_attn_scalar") ** -0.5,
        attention_soft_cap=reader.optional_number("attn_logit_softcapping") or 0.0,
        logit_soft_cap=reader.optional_number("final_logit_softcapping") or 0.0,
    )


GEMMA2 = Family(
    name="gemma2",
    architectures=("Gemma2ForCausalLM",),
    translate=translate,
    hf_names=SANDWICH_HF_NAMES,
    gguf_names=SANDWICH_GGUF_NAMES,
    ignored=IGNORED,
    gguf_adds_one=True,
)
