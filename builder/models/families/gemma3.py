"""Gemma 3's text models: Gemma 2 with norms over the heads of Q and K in place of soft caps on
attention, and a RoPE of its own for the layers with a window."""

from typing import Any

from llmbuild.builder.models.config import DecoderConfig
from llmbuild.builder.models.families.common import (
    FULL,
    IGNORED,
    SLIDING,
    read_ropes_by_type,
    read_windows_by_pattern,
)
from llmbuild.builder.models.families.family import Family
from llmbuild.builder.models.families.gemma import open_gemma, read_gemma
from llmbuild.builder.models.families.gemma2 import SANDWICH_GGUF_NAMES, SANDWICH_HF_NAMES


def translate(raw: dict[str, Any]) -> DecoderConfig:
    reader = open_gemma(raw, "gemma3_text")
    # What transformers takes for it when it is left out is Gemma 3 4B's own value.
    reader.require("query_pre_attn_scalar")
    cap = reader.optional_number("attn_logit_softcapping")
    if cap is not None:
        reader.refuse("attn_logit_softcapping", cap, "null: Gemma 3 caps no attention scores")
    windows = read_windows_by_pattern(reader, 6)
    thetas = {
        FULL: reader.number("rope_theta", 1e6),
        SLIDING: reader.number("rope_local_base_freq", 1e4),
    }
    ropes = read_ropes_by_type(reader, reader.integer("head_dim"), thetas)
    return read_gemma(
        reader,
        qk_norm="head",
        post_norm=True,
        windows=windows,
        ropes=(ropes[FULL], ropes[SLIDING]),
        layer_ropes=tuple(1 if window else 0 for window in windows),
        attention_scale=reader.number("query_pre_attn_scalar") ** -0.5,
        logit_soft_cap=reader.optional_number("final_logit_softcapping") or 0.0,
    )


GEMMA3_TEXT = Family(
    name="gemma3_text",
    architectures=("Gemma3ForCausalLM",),
    translate=translate,
    hf_names=SANDWICH_HF_NAMES,
    gguf_names=SANDWICH_GGUF_NAMES,
    ignored=IGNORED,
    gguf_adds_one=True,
)
