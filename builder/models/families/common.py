"""What Llama-shaped families share: names of weights, and the keys all their configs have."""

from typing import Any

from llmbuild.builder.models.config import DecoderConfig, NormConfig, RopeConfig
from llmbuild.builder.models.config_reader import CARRIES_NOTHING, ConfigReader
from llmbuild.builder.models.rope import DEFAULT_THETA, read_rope

_MODULES = {  # canonical name inside a layer -> Hugging Face name, GGUF name
    "attn_norm": ("input_layernorm", "attn_norm"),
    "attention.q_proj": ("self_attn.q_proj", "attn_q"),
    "attention.k_proj": ("self_attn.k_proj", "attn_k"),
    "attention.v_proj": ("self_attn.v_proj", "attn_v"),
    "attention.o_proj": ("self_attn.o_proj", "attn_output"),
    "attention.q_norm": ("self_attn.q_norm", "attn_q_norm"),
    "attention.k_norm": ("self_attn.k_norm", "attn_k_norm"),
    "mlp_norm": ("post_attention_layernorm", "ffn_norm"),
    "mlp.gate_proj": ("mlp.gate_proj", "ffn_gate"),
    "mlp.up_proj": ("mlp.up_proj", "ffn_up"),
    "mlp.down_proj": ("mlp.down_proj", "ffn_down"),
}

HF_NAMES = {
    "embed.weight": "model.embed_tokens.weight",
    "final_norm.weight": "model.norm.weight",
    "lm_head.weight": "lm_head.weight",
} | {
    f"layers.{{l}}.{module}.{part}": f"model.layers.{{l}}.{hf}.{part}"
    for module, (hf, _) in _MODULES.items()
    for part in ("weight", "bias")
}

GGUF_NAMES = {
    "embed.weight": "token_embd.weight",
    "final_norm.weight": "output_norm.weight",
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
    return max(
        int(max_position * rope.factor) if rope.kind == "dynamic" else max_position
        for rope in ropes
    )


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


def read_windows_by_layer(reader: ConfigReader) -> tuple[int, ...]:
    """Windows in the Qwen spelling: with use_sliding_window, layers from max_window_layers on
    slide, unless layer_types says which do."""
    num_layers = reader.integer("num_hidden_layers")
    slides = reader.boolean("use_sliding_window", False)
    if slides:
        reader.require("sliding_window", "max_window_layers")
    window = reader.optional_integer("sliding_window") or 0
    if slides and not window:
        reader.refuse("sliding_window", None, "a number of tokens, as use_sliding_window is true")
    first = num_layers
    if "max_window_layers" in reader:
        first = reader.integer("max_window_layers", minimum=0)
    types = reader.texts("layer_types", (FULL, SLIDING))
    if types is None:
        types = tuple(SLIDING if slides and i >= first else FULL for i in range(num_layers))
    if len(types) != num_layers:
        reader.refuse("layer_types", types, f"a list of {num_layers}, one for each layer")
    if SLIDING in types and not slides:
        reader.refuse("layer_types", types, f"{FULL} alone, as use_sliding_window is false")
    return tuple(window if kind == SLIDING else 0 for kind in types)
