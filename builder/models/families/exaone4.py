"""EXAONE 4: norms after attention and MLP alone, one over each head of Q and K, and in the models
with windows no RoPE where attention is full."""

from typing import Any

from llmbuild.builder.models.config import NO_ROPE, DecoderConfig
from llmbuild.builder.models.config_reader import ConfigReader
from llmbuild.builder.models.families.common import (
    FULL,
    GGUF_NAMES,
    HF_NAMES,
    IGNORED,
    SLIDING,
    read_decoder,
    read_layer_types,
    windows_of,
)
from llmbuild.builder.models.families.family import Family


def translate(raw: dict[str, Any]) -> DecoderConfig:
    reader = ConfigReader(raw, "exaone4")
    # What transformers takes for these when they are left out is one model's own value.
    reader.require("num_key_value_heads", "sliding_window")
    num_layers = reader.integer("num_hidden_layers")
    windowed = reader.optional_integer("sliding_window") is not None
    if windowed:
        # A pattern says the same in one of two spellings, of which transformers reads neither
        # where layer_types stands.
        reader.require("layer_types")
    reader.ignore("sliding_window_pattern")
    types = read_layer_types(reader, [FULL] * num_layers)
    turns = [not windowed or kind == SLIDING for kind in types]
    return read_decoder(
        reader,
        qk_norm="head",
        pre_norm=False,
        post_norm=True,
        layer_ropes=tuple(0 if turn else NO_ROPE for turn in turns),
        windows=windows_of(reader, types),
    )


EXAONE4 = Family(
    name="exaone4",
    architectures=("Exaone4ForCausalLM",),
    translate=translate,
    hf_names=HF_NAMES,
    gguf_names=GGUF_NAMES,
    ignored=IGNORED,
)
