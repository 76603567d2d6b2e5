"""What Llama-shaped families share: names of weights, and the keys all their configs have."""

from collections.abc import Mapping, Sequence
from typing import Any

from llmbuild.builder.models.config import DecoderConfig, NormConfig, RopeConfig
from llmbuild.builder.models.config_reader import CARRIES_NOTHING, MAX_INTEGER, ConfigReader
from llmbuild.builder.models.rope import (
    DEFAULT_THETA,
    RopeContext,
    read_rope,
    read_section,
    rotary_dim,
)

# Canonical name inside a layer -> Hugging Face name, GGUF name. post_attention_layernorm is two
# things: Llama's norm before the MLP, and after attention where there are norms after.
from llmbuild.errors import ModelError

_MODULES = {
    "attn_norm": ("input_layernorm", "attn_norm"),
    "attention.q_proj": ("self_attn.q_proj", "attn_q"),
    "attention.k_proj": ("self_attn.k_proj", "attn_k"),
    "attention.v_proj": ("self_attn.v_proj", "attn_v"),
    "attention.o_proj": ("self_attn.o_proj", "attn_output"),
    "attention.q_norm": ("self_attn.q_norm", "attn_q_norm"),
    "attention.k_norm": ("self_attn.k_norm", "attn_k_norm"),
    "mlp_norm": ("post_attention_layernorm", "ffn_norm"),
    "attn_post_norm": ("post_attention_layernorm", "post_attention_norm"),
    "mlp_post_norm": ("post_feedforward_layernorm", "post_ffw_norm"),
    "mlp.gate_proj": ("mlp.gate_proj", "ffn_gate"),
    "mlp.up_proj": ("mlp.up_proj", "ffn_up"),
    "mlp.down_proj": ("mlp.down_proj", "ffn_down"),
}

HF_NAMES = {
    "embed.weight": "model.embed_tokens.weight",
    "final_norm.weight": "model.norm.weight",
    "final_norm.bias": "model.norm.bias",
    "lm_head.weight": "lm_head.weight",
} | {
    f"layers.{{l}}.{module}.{part}": f"model.layers.{{l}}.{hf}.{part}"
    for module, (hf, _) in _MODULES.items()
    for part in ("weight", "bias")
}

GGUF_NAMES = {
    "embed.weight": "token_embd.weight",
    "final_norm.weight": "output_norm.weight",
    "final_norm.bias": "output_norm.bias",
    "lm_head.weight": "output.weight",
} | {
    f"layers.{{l}}.{module}.{part}": f"blk.{{l}}.{gguf}.{part}"
    for module, (_, gguf) in _MODULES.items()
    for part in ("weight", "bias")
}

ACTIVATIONS = {  # as configs spell them -> as the decoder does
    "silu": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
    "relu2": "relu2",
}

FULL, SLIDING = "full_attention", "sliding_attention"  # what layer_types is made of

# Old exports stored each layer's rotary frequencies, which follow from the config.
IGNORED = ("model.layers.{l}.self_attn.rotary_emb.inv_freq",)


def read_decoder(
    reader: ConfigReader,
    *,
    norm: NormConfig | None = None,
    ropes: tuple[RopeConfig, ...] | None = None,
    layer_ropes: tuple[int, ...] | None = None,
    windows: tuple[int, ...] | None = None,
    attention_scale: float | None = None,
    activation: str | None = None,
    tied_by_default: bool = False,
    default_theta: float = DEFAULT_THETA,
    **features: Any,
) -> DecoderConfig:
    """The config record, from the keys that Llama-shaped families have and a family's features.

    What is None is read from the usual keys: norm an RMSNorm with rms_norm_eps, one RoPE in every
    layer, no windows, a scale of head_dim^-1/2, hidden_act. features: further fields of
    DecoderConfig. This ends the reading: a key that neither the family nor this function took is
    refused. Raises ModelError.
    """
    reader.only("is_encoder_decoder", False)
    reader.only("add_cross_attention", False)
    num_heads, num_kv_heads, head_dim = read_heads(reader)
    num_layers = reader.integer("num_hidden_layers")
    if ropes is None:
        ropes = (read_rope(reader, head_dim, default_theta=default_theta),)
    config = DecoderConfig(
        family=reader.family,
        vocab_size=reader.integer("vocab_size"),
        hidden_size=reader.integer("hidden_size"),
        intermediate_size=reader.integer("intermediate_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        max_position=_reach(reader.integer("max_position_embeddings"), ropes),
        tie_embeddings=reader.boolean("tie_word_embeddings", tied_by_default),
        norm=norm or NormConfig(reader.number("rms_norm_eps")),
        ropes=ropes,
        layer_ropes=layer_ropes or (0,) * num_layers,
        windows=windows or (0,) * num_layers,
        attention_scale=attention_scale or head_dim**-0.5,
        activation=activation or read_activation(reader),
        **features,
    )
    reader.finish(CARRIES_NOTHING)
    return config


def _reach(max_position: int, ropes: tuple[RopeConfig, ...]) -> int:
    """Positions that a model is good for: max_position_embeddings, but dynamic scaling, which
    begins there, goes on to `factor` times that."""
    reaches = (
        int(min(max_position * rope.factor, MAX_INTEGER))
        for rope in ropes
        if rope.kind == "dynamic"
    )
    return max(reaches, default=max_position)


def respell(raw: dict[str, Any], family: str, spellings: dict[str, str]) -> dict[str, Any]:
    """The config with each key of `spellings` renamed to the usual one that it stands for. Both
    may be there, as aliases of transformers, if they agree. Raises ModelError."""
    config = dict(raw)
    for key in spellings.keys() & raw.keys():
        value, usual = config.pop(key), spellings[key]
        if config.setdefault(usual, value) != value:
            raise ModelError(
                f"{family} config: {key} is {value!r}, but {usual}, which means the same, is "
                f"{config[usual]!r}; keep one."
            )
    return config


def read_activation(reader: ConfigReader, key: str = "hidden_act") -> str:
    """The activation that a config names, in the decoder's spelling."""
    return ACTIVATIONS[reader.text(key, tuple(ACTIVATIONS)) or "silu"]


def read_heads(reader: ConfigReader) -> tuple[int, int, int]:
    """num_heads, num_kv_heads (num_heads when unset), head_dim (hidden / heads when unset)."""
    hidden, heads = reader.integer("hidden_size"), reader.integer("num_attention_heads")
    kv_heads = reader.optional_integer("num_key_value_heads") or heads
    if heads % kv_heads:
        allowed = f"a divisor of num_attention_heads, {heads}"
        reader.refuse("num_key_value_heads", kv_heads, allowed)
    head_dim = reader.optional_integer("head_dim")
    if head_dim is None:
        if hidden % heads:
            allowed = f"a multiple of num_attention_heads, {heads}, when head_dim is unset"
            reader.refuse("hidden_size", hidden, allowed)
        head_dim = hidden // heads
    if head_dim % 2:
        reader.refuse("head_dim", head_dim, "an even number, as rotary embedding turns pairs")
    return heads, kv_heads, head_dim


def read_layer_types(reader: ConfigReader, default: Sequence[str]) -> tuple[str, ...]:
    """layer_types, FULL or SLIDING for each layer; `default` when it is absent or null."""
    types = reader.texts("layer_types", (FULL, SLIDING))
    num_layers = reader.integer("num_hidden_layers")
    if types is None:
        types = tuple(default)
    if len(types) != num_layers:
        reader.refuse("layer_types", types, f"a list of {num_layers}, one for each layer")
    return types


def windows_of(reader: ConfigReader, types: Sequence[str]) -> tuple[int, ...]:
    """sliding_window for the layers that slide, 0 for the others."""
    window = reader.optional_integer("sliding_window", minimum=0) or 0
    if SLIDING in types and not window:
        reader.refuse("sliding_window", None, "a number of tokens, as there are layers that slide")
    return tuple(window if kind == SLIDING else 0 for kind in types)


def read_ropes_by_type(
    reader: ConfigReader, head_dim: int, thetas: Mapping[str, float]
) -> dict[str, RopeConfig]:
    """The RoPE of each kind of layer: rope_parameters holds a section for each, while rope_scaling
    is for full attention alone. thetas: of each kind, where its section has none. Raises
    ModelError."""
    nested, scaling = reader.section("rope_parameters"), reader.section("rope_scaling")
    if nested and scaling:
        reader.fail("has both rope_scaling and rope_parameters; keep one")
    ropes = {}
    for kind, theta in thetas.items():
        section = nested.section(kind) if nested else scaling if kind == FULL else None
        section = section or ConfigReader({}, reader.family)
        context = RopeContext(
            theta=section.number("rope_theta", theta),
            rotary_dim=rotary_dim(section, head_dim, 1.0),
            max_position=reader.integer("max_position_embeddings"),
            original_max_position=None,
        )
        ropes[kind] = read_section(section, context)
    if nested:
        nested.finish()
    return ropes


def read_windows_by_layer(reader: ConfigReader) -> tuple[int, ...]:
    """Windows in the Qwen spelling: with use_sliding_window, layers from max_window_layers on
    slide, unless layer_types says which do."""
    num_layers = reader.integer("num_hidden_layers")
    slides = reader.boolean("use_sliding_window", False)
    if slides:
        reader.require("sliding_window", "max_window_layers")
    first = num_layers
    if "max_window_layers" in reader:
        first = reader.integer("max_window_layers", minimum=0)
    default = [SLIDING if slides and i >= first else FULL for i in range(num_layers)]
    types = read_layer_types(reader, default)
    if SLIDING in types and not slides:
        reader.refuse("layer_types", types, f"{FULL} alone, as use_sliding_window is false")
    return windows_of(reader, types)


def read_windows_by_pattern(reader: ConfigReader, default: int) -> tuple[int, ...]:
    """Windows in the Gemma spelling: every sliding_window_pattern-th layer (`default` when unset)
    attends to all and the others slide, unless layer_types says which do."""
    reader.ignore("cache_implementation")  # how transformers keeps such layers' keys
    pattern = reader.optional_integer("sliding_window_pattern") or default
    noted = reader.optional_integer("_sliding_window_pattern")  # beside layer_types, from exports
    num_layers = reader.integer("num_hidden_layers")
    types = [FULL if layer % pattern == 0 else SLIDING for layer in range(1, num_layers + 1)]
    if noted not in (None, pattern) and "layer_types" not in reader:
        reader.refuse("_sliding_window_pattern", noted, f"{pattern}, or layer_types beside it")
    return windows_of(reader, read_layer_types(reader, types))
