"""Phi-3, Phi-3.5 and Phi-4, mini to 14B: fused projections, and LongRoPE in the long versions."""

from typing import Any

from llmbuild.builder.models.config import DecoderConfig
from llmbuild.builder.models.config_reader import ConfigReader
from llmbuild.builder.models.families.common import (
    GGUF_NAMES,
    HF_NAMES,
    IGNORED,
    read_decoder,
    read_heads,
)
from llmbuild.builder.models.families.family import Family
from llmbuild.builder.models.families.fused import gate_up_parts, in_thirds, qkv_parts
from llmbuild.builder.models.rope import read_rope


def translate(raw: dict[str, Any]) -> DecoderConfig:
    reader = ConfigReader(raw, "phi3")
    for key in ("attention_bias", "mlp_bias", "lm_head_bias"):
        reader.only(key, False)
    # Phi-4-mini states these two, which no released code reads: 1 is no interpolation, and full
    # attention in every layer.
    reader.only("interpolate_factor", 1)
    reader.only("full_attn_mod", 1)
    rope = read_rope(reader, read_heads(reader)[2])
    if rope.kind not in ("default", "longrope"):
        reader.fail(f"has RoPE of kind {rope.kind!r}; allowed is 'default' or 'longrope'")
    if rope.kind == "longrope":
        # transformers takes the one beside the section, and Phi-3-mini's own where it is left out.
        original = reader.integer("original_max_position_embeddings")
        if original != rope.original_max_position:
            allowed = f"the same as inside the RoPE section, {rope.original_max_position}"
            reader.refuse("original_max_position_embeddings", original, allowed)
    window = reader.optional_integer("sliding_window") or 0
    windows = (window,) * reader.integer("num_hidden_layers")
    return read_decoder(reader, ropes=(rope,), windows=windows)


PHI3 = Family(
    name="phi3",
    architectures=("Phi3ForCausalLM",),
    translate=translate,
    hf_names=HF_NAMES
    | qkv_parts("model.layers.{l}.self_attn.qkv_proj", in_thirds)
    | gate_up_parts("model.layers.{l}.mlp.gate_up_proj.weight"),
    gguf_names=GGUF_NAMES
    | qkv_parts("blk.{l}.attn_qkv", in_thirds)
    | gate_up_parts("blk.{l}.ffn_up.weight"),
    ignored=IGNORED,
)
