"""StarCoder2: LayerNorm, an MLP without a gate, biases everywhere, one window for all layers."""

from typing import Any

from llmbuild.builder.models.config import DecoderConfig, NormConfig
from llmbuild.builder.models.config_reader import ConfigReader
from llmbuild.builder.models.families.common import GGUF_NAMES, HF_NAMES, IGNORED, read_decoder
from llmbuild.builder.models.families.family import Family


def translate(raw: dict[str, Any]) -> DecoderConfig:
    reader = ConfigReader(raw, "starcoder2")
    # What transformers takes for it when it is left out is StarCoder2 3B's own value.
    reader.require("num_key_value_heads", "hidden_act")
    reader.only("norm_type", "layer_norm")
    reader.only("mlp_type", "default")
    bias = reader.boolean("use_bias", True)
    window = reader.optional_integer("sliding_window") or 0
    return read_decoder(
        reader,
        norm=NormConfig(reader.number("norm_epsilon"), kind="layer", bias=True),
        windows=(window,) * reader.integer("num_hidden_layers"),
        gated_mlp=False,
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=bias,
        tied_by_default=True,
    )


_MLP = {
    f"layers.{{l}}.mlp.{name}.{part}": f"model.layers.{{l}}.mlp.{hf}.{part}"
    for name, hf in (("up_proj", "c_fc"), ("down_proj", "c_proj"))
    for part in ("weight", "bias")
}

STARCODER2 = Family(
    name="starcoder2",
    architectures=("Starcoder2ForCausalLM",),
    translate=translate,
    hf_names=HF_NAMES | _MLP,
    gguf_names=GGUF_NAMES,
    ignored=IGNORED,
)
