"""Cohere's Command-R7B and Command-A: layers with a window turn by RoPE, the others not at all."""

from typing import Any

from llmbuild.builder.models.config import NO_ROPE, DecoderConfig
from llmbuild.builder.models.config_reader import ConfigReader
from llmbuild.builder.models.families.cohere import read_cohere
from llmbuild.builder.models.families.common import (
    GGUF_NAMES,
    HF_NAMES,
    IGNORED,
    read_windows_by_pattern,
)
from llmbuild.builder.models.families.family import Family


def translate(raw: dict[str, Any]) -> DecoderConfig:
    reader = ConfigReader(raw, "cohere2")
    # Published configs say in these what the family does anyway.
    reader.only("order_of_interleaved_layers", "local_attn_first")
    reader.only("position_embedding_type", "rope_gptj")
    reader.only("rotary_pct", 1.0)
    reader.only("use_embedding_sharing", True)
    reader.only("use_gated_activation", True)
    reader.only("use_parallel_block", True)
    reader.ignore("use_parallel_embedding")  # how the table was split in training
    windows = read_windows_by_pattern(reader, 4)
    full_layers = [layer for layer, window in enumerate(windows, 1) if not window]
    if "layer_switch" in reader:
        switch = reader.integer("layer_switch")
        if full_layers != list(range(switch, len(windows) + 1, switch)):
            reader.refuse("layer_switch", switch, "the interval of the layers without a window")
    layer_ropes = tuple(0 if window else NO_ROPE for window in windows)
    return read_cohere(reader, windows=windows, layer_ropes=layer_ropes)


COHERE2 = Family(
    name="cohere2",
    architectures=("Cohere2ForCausalLM",),
    translate=translate,
    hf_names=HF_NAMES,
    gguf_names=GGUF_NAMES,
    ignored=IGNORED,
)
