"""SmolLM3: every fourth layer, or those that no_rope_layers names, does without RoPE."""

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
    reader = ConfigReader(raw, "smollm3")
    # What transformers takes for it when it is left out is SmolLM3 3B's own value.
    reader.require("num_key_value_heads")
    reader.ignore("max_window_layers")  # in the published config, from its Qwen2 ancestry
    num_layers = reader.integer("num_hidden_layers")
    interval = reader.optional_integer("no_rope_layer_interval") or 4
    default_turns = [int(layer % interval != 0) for layer in range(1, num_layers + 1)]
    turns = reader.integers("no_rope_layers") or default_turns  # 0 where a layer has no RoPE
    if len(turns) != num_layers:
        allowed = f"a list of {num_layers}, one for each layer"
        reader.refuse("no_rope_layers", turns, allowed)
    slides = reader.boolean("use_sliding_window", False)
    slides_by_default = slides and reader.optional_integer("sliding_window") is not None
    default = [SLIDING if slides_by_default and not turn else FULL for turn in turns]
    types = read_layer_types(reader, default)
    if SLIDING in types and not slides:
        reader.refuse("layer_types", types, f"{FULL} alone, as use_sliding_window is false")
    attention_bias = reader.boolean("attention_bias", False)
    return read_decoder(
        reader,
        layer_ropes=tuple(0 if turn else NO_ROPE for turn in turns),
        windows=windows_of(reader, types),
        tied_by_default=True,
        default_theta=2_000_000.0,
        qkv_bias=attention_bias,
        o_bias=attention_bias,
        mlp_bias=reader.boolean("mlp_bias", False),
    )


SMOLLM3 = Family(
    name="smollm3",
    architectures=("SmolLM3ForCausalLM",),
    translate=translate,
    hf_names=HF_NAMES,
    gguf_names=GGUF_NAMES,
    ignored=IGNORED,
    gguf_permuted_qk=True,
)
