"""EXAONE 3.0 and 3.5: a Llama under other names, in the config and in the files."""

from typing import Any

from llmbuild.builder.models.config import DecoderConfig
from llmbuild.builder.models.config_reader import ConfigReader
from llmbuild.builder.models.families.common import GGUF_NAMES, read_decoder, respell
from llmbuild.builder.models.families.family import Family

_SPELLINGS = {
    "num_layers": "num_hidden_layers",
    "layer_norm_epsilon": "rms_norm_eps",
    "activation_function": "hidden_act",
}


def translate(raw: dict[str, Any]) -> DecoderConfig:
    reader = ConfigReader(respell(raw, "exaone", _SPELLINGS), "exaone")
    # Left out, these mean one thing to EXAONE's own code and another to transformers.
    reader.require("num_key_value_heads")
    if "rope_parameters" not in reader:
        reader.require("rope_theta")
    attention_bias = reader.boolean("attention_bias", False)
    return read_decoder(
        reader,
        qkv_bias=attention_bias,
        o_bias=attention_bias,
        mlp_bias=reader.boolean("mlp_bias", False),
        default_theta=500_000.0,
    )


_MODULES = {
    "embed": "transformer.wte",
    "final_norm": "transformer.ln_f",
    "lm_head": "lm_head",
    "layers.{l}.attn_norm": "transformer.h.{l}.ln_1",
    "layers.{l}.attention.q_proj": "transformer.h.{l}.attn.attention.q_proj",
    "layers.{l}.attention.k_proj": "transformer.h.{l}.attn.attention.k_proj",
    "layers.{l}.attention.v_proj": "transformer.h.{l}.attn.attention.v_proj",
    "layers.{l}.attention.o_proj": "transformer.h.{l}.attn.attention.out_proj",
    "layers.{l}.mlp_norm": "transformer.h.{l}.ln_2",
    "layers.{l}.mlp.gate_proj": "transformer.h.{l}.mlp.c_fc_0",
    "layers.{l}.mlp.up_proj": "transformer.h.{l}.mlp.c_fc_1",
    "layers.{l}.mlp.down_proj": "transformer.h.{l}.mlp.c_proj",
}

EXAONE = Family(
    name="exaone",
    # transformers, which runs it as a Llama, saves it under that name.
    architectures=("ExaoneForCausalLM", "LlamaForCausalLM"),
    translate=translate,
    hf_names={
        f"{name}.{part}": f"{hf}.{part}"
        for name, hf in _MODULES.items()
        for part in ("weight", "bias")
    },
    gguf_names=GGUF_NAMES,
    ignored=(),
)
