"""GPT-NeoX and Pythia: attention and MLP in parallel, each with a LayerNorm of its own, a quarter
of each head turned, Q, K and V stored together."""

from typing import Any

from llmbuild.builder.models.config import DecoderConfig, NormConfig
from llmbuild.builder.models.config_reader import ConfigReader
from llmbuild.builder.models.families.common import (
    GGUF_NAMES,
    read_decoder,
    read_heads,
    respell,
)
from llmbuild.builder.models.families.family import Family, Source
from llmbuild.builder.models.families.fused import by_kv_head, in_thirds, qkv_parts
from llmbuild.builder.models.rope import read_rope

_SPELLINGS = {"rotary_pct": "partial_rotary_factor", "rotary_emb_base": "rope_theta"}


def translate(raw: dict[str, Any]) -> DecoderConfig:
    reader = ConfigReader(respell(raw, "gpt_neox", _SPELLINGS), "gpt_neox")
    reader.require("hidden_act")
    reader.ignore("is_decoder")  # the model is causal either way
    _, _, head_dim = read_heads(reader)
    bias = reader.boolean("attention_bias", True)
    return read_decoder(
        reader,
        norm=NormConfig(reader.number("layer_norm_eps"), kind="layer", bias=True),
        ropes=(read_rope(reader, head_dim, default_part=0.25),),
        parallel_residual=reader.boolean("use_parallel_residual", True),
        gated_mlp=False,
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=True,
    )


_MODULES = {
    "embed": "gpt_neox.embed_in",
    "final_norm": "gpt_neox.final_layer_norm",
    "lm_head": "embed_out",
    "layers.{l}.attn_norm": "gpt_neox.layers.{l}.input_layernorm",
    "layers.{l}.mlp_norm": "gpt_neox.layers.{l}.post_attention_layernorm",
    "layers.{l}.attention.o_proj": "gpt_neox.layers.{l}.attention.dense",
    "layers.{l}.mlp.up_proj": "gpt_neox.layers.{l}.mlp.dense_h_to_4h",
    "layers.{l}.mlp.down_proj": "gpt_neox.layers.{l}.mlp.dense_4h_to_h",
}
_NAMES: dict[str, Source] = {
    f"{name}.{part}": f"{hf}.{part}" for name, hf in _MODULES.items() for part in ("weight", "bias")
}
_MASKS = ("bias", "masked_bias", "rotary_emb.inv_freq")  # buffers that old exports stored

GPT_NEOX = Family(
    name="gpt_neox",
    architectures=("GPTNeoXForCausalLM",),
    translate=translate,
    hf_names=_NAMES | qkv_parts("gpt_neox.layers.{l}.attention.query_key_value", by_kv_head),
    gguf_names=GGUF_NAMES | qkv_parts("blk.{l}.attn_qkv", in_thirds),
    ignored=tuple(f"gpt_neox.layers.{{l}}.attention.{name}" for name in _MASKS),
)
