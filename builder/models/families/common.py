"""What Llama-shaped families share: names of weights, and the keys all their configs have."""

from llmbuild.builder.models.config import DecoderConfig
from llmbuild.builder.models.config_reader import CARRIES_NOTHING, ConfigReader
from llmbuild.builder.models.rope import read_rope

_MODULES = {  # canonical name inside a layer -> Hugging Face name, GGUF name
    "attn_norm": ("input_layernorm", "attn_norm"),
    "q_proj": ("self_attn.q_proj", "attn_q"),
    "k_proj": ("self_attn.k_proj", "attn_k"),
    "v_proj": ("self_attn.v_proj", "attn_v"),
    "o_proj": ("self_attn.o_proj", "attn_output"),
    "q_norm": ("self_attn.q_norm", "attn_q_norm"),
    "k_norm": ("self_attn.k_norm", "attn_k_norm"),
    "mlp_norm": ("post_attention_layernorm", "ffn_norm"),
    "gate_proj": ("mlp.gate_proj", "ffn_gate"),
    "up_proj": ("mlp.up_proj", "ffn_up"),
    "down_proj": ("mlp.down_proj", "ffn_down"),
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

FULL, SLIDING = "full_attention", "sliding_attention"  # what layer_types is made of

# Old exports stored each layer's rotary frequencies, which follow from the config.
IGNORED = ("model.layers.{l}.self_attn.rotary_emb.inv_freq",)


def read_decoder(
    reader: ConfigReader,
    *,
    qk_norm: bool = False,
    qkv_bias: bool = False,
    o_bias: bool = False,
    mlp_bias: bool = False,
    windows: tuple[int, ...] = (),
) -> DecoderConfig:
    """The config record, from the keys that every family has and a family's own features.

    windows: per layer, or () when every layer attends to all. This ends the reading: a key that
    neither the family nor this function took is refused. Raises ModelError.
    """
    reader.only("hidden_act", "silu")
    reader.only("is_encoder_decoder", False)
    reader.only("add_cross_attention", False)
    num_heads, num_kv_heads, head_dim = _read_heads(reader)
    max_position = reader.integer("max_position_embeddings")
    num_layers = reader.integer("num_hidden_layers")
    config = DecoderConfig(
        family=reader.family,
        vocab_size=reader.integer("vocab_size"),
        hidden_size=reader.integer("hidden_size"),
        intermediate_size=reader.integer("intermediate_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        norm_eps=reader.number("rms_norm_eps"),
        rope=read_rope(reader, max_position),
        max_position=max_position,
        tie_embeddings=reader.boolean("tie_word_embeddings", False),
        qk_norm=qk_norm,
        qkv_bias=qkv_bias,
        o_bias=o_bias,
        mlp_bias=mlp_bias,
        windows=windows or (0,) * num_layers,
    )
    reader.finish(CARRIES_NOTHING)
    return config


def _read_heads(reader: ConfigReader) -> tuple[int, int, int]:
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
