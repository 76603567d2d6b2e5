"""OLMo 3: OLMo 2 with windows in three layers of four, and RoPE scaling in the fourth alone."""

from typing import Any

from llmbuild.builder.models.config import DecoderConfig
from llmbuild.builder.models.config_reader import ConfigReader
from llmbuild.builder.models.families.common import (
    FULL,
    GGUF_NAMES,
    HF_NAMES,
    IGNORED,
    SLIDING,
    read_heads,
    read_layer_types,
    read_ropes_by_type,
    windows_of,
)
from llmbuild.builder.models.families.family import Family
from llmbuild.builder.models.families.olmo2 import read_olmo

THETA = 500_000.0


def translate(raw: dict[str, Any]) -> DecoderConfig:
    reader = ConfigReader(raw, "olmo3")
    # transformers gives another rope_theta to the full layers alone, for no model that is known.
    reader.only("rope_theta", THETA)
    num_layers = reader.integer("num_hidden_layers")
    default = [FULL if (layer + 1) % 4 == 0 else SLIDING for layer in range(num_layers)]
    types = read_layer_types(reader, default)
    head_dim = read_heads(reader)[2]
    by_type = read_ropes_by_type(reader, head_dim, {FULL: THETA, SLIDING: THETA})
    ropes = tuple(dict.fromkeys(by_type[kind] for kind in types))
    return read_olmo(
        reader,
        ropes=ropes,
        layer_ropes=tuple(ropes.index(by_type[kind]) for kind in types),
        windows=windows_of(reader, types),
    )


OLMO3 = Family(
    name="olmo3",
    architectures=("Olmo3ForCausalLM",),
    translate=translate,
    hf_names=HF_NAMES,
    # A GGUF says "olmo2" for both.
    gguf_names=GGUF_NAMES,
    ignored=IGNORED,
)
