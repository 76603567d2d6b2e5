"""GPT-2: learned positions in place of RoPE, LayerNorm, weights stored [in, out]."""

from typing import Any

from llmbuild.builder.models.config import NO_ROPE, DecoderConfig, NormConfig
from llmbuild.builder.models.config_reader import ConfigReader
from llmbuild.builder.models.families.common import GGUF_NAMES, read_decoder, respell
from llmbuild.builder.models.families.family import Family, Source
from llmbuild.builder.models.families.fused import in_thirds, qkv_parts, transposed

_SPELLINGS = {
    "n_embd": "hidden_size",
    "n_inner": "intermediate_size",
    "n_layer": "num_hidden_layers",
    "n_head": "num_attention_heads",
    "n_positions": "max_position_embeddings",
    "activation_function": "hidden_act",
}


def translate(raw: dict[str, Any]) -> DecoderConfig:
    raw = respell(raw, "gpt2", _SPELLINGS)
    if raw.get("intermediate_size") is None:
        raw["intermediate_size"] = 4 * ConfigReader(raw, "gpt2").integer("hidden_size")
    reader = ConfigReader(raw, "gpt2")
    reader.require("hidden_act")
    reader.only("n_ctx", reader.integer("max_position_embeddings"))
    reader.only("n_special", 0)
    reader.only("predict_special_tokens", True)
    reader.only("scale_attn_weights", True)
    reader.only("scale_attn_by_inverse_layer_idx", False)
    reader.only("reorder_and_upcast_attn", False)
    return read_decoder(
        reader,
        norm=NormConfig(reader.number("layer_norm_epsilon"), kind="layer", bias=True),
        ropes=(),
        layer_ropes=(NO_ROPE,) * reader.integer("num_hidden_layers"),
        learned_positions=True,
        gated_mlp=False,
        qkv_bias=True,
        o_bias=True,
        mlp_bias=True,
        tied_by_default=True,
    )


_POSITIONS, _O = "position_embed.weight", "layers.{l}.attention.o_proj"
_UP, _DOWN = "layers.{l}.mlp.up_proj", "layers.{l}.mlp.down_proj"
_MODULES = {  # which all have biases
    "final_norm": "transformer.ln_f",
    "layers.{l}.attn_norm": "transformer.h.{l}.ln_1",
    _O: "transformer.h.{l}.attn.c_proj",
    "layers.{l}.mlp_norm": "transformer.h.{l}.ln_2",
    _UP: "transformer.h.{l}.mlp.c_fc",
    _DOWN: "transformer.h.{l}.mlp.c_proj",
}
_NAMES: dict[str, Source] = {
    "embed.weight": "transformer.wte.weight",
    _POSITIONS: "transformer.wpe.weight",
    "lm_head.weight": "lm_head.weight",
    **{f"{n}.{part}": f"{hf}.{part}" for n, hf in _MODULES.items() for part in ("weight", "bias")},
    **qkv_parts("transformer.h.{l}.attn.c_attn", in_thirds, transposed=True),
    **transposed(_O, _MODULES[_O], lambda c: (c.q_size, c.hidden_size)),
    **transposed(_UP, _MODULES[_UP], lambda c: (c.hidden_size, c.intermediate_size)),
    **transposed(_DOWN, _MODULES[_DOWN], lambda c: (c.intermediate_size, c.hidden_size)),
}

GPT2 = Family(
    name="gpt2",
    architectures=("GPT2LMHeadModel",),
    translate=translate,
    hf_names=_NAMES,
    gguf_names=GGUF_NAMES
    | {_POSITIONS: "position_embd.weight"}
    | qkv_parts("blk.{l}.attn_qkv", in_thirds),
    ignored=tuple(f"transformer.h.{{l}}.attn.{mask}" for mask in ("bias", "masked_bias")),
    bare_prefix="transformer.",
)
