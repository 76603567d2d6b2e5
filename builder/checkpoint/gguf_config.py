"""GGUF metadata -> a Hugging Face style config dict."""

from collections.abc import Mapping, Sequence
from typing import Any

from llmbuild.builder.checkpoint.base import TensorInfo
from llmbuild.builder.checkpoint.gguf_architectures import ARCHITECTURES, GgufArchitecture
from llmbuild.builder.checkpoint.gguf_keys import ModelKeys
from llmbuild.builder.checkpoint.gguf_rope import gguf_rope
from llmbuild.errors import CheckpointError

_FULL, _SLIDING = "full_attention", "sliding_attention"


def gguf_config(
    metadata: Mapping[str, Any],
    tensors: Mapping[str, TensorInfo],
    rope_factors: Mapping[str, Sequence[float]] | None = None,
) -> dict[str, Any]:
    """The model config that the file's metadata and tensor list describe.

    rope_factors: the rotary divisors that are stored as tensors, by their names in gguf_rope.
    Raises CheckpointError for another architecture, and for any "{architecture}.*" key that is
    missing, malformed, or not understood.
    """
    architecture, keys = _architecture(metadata)
    num_heads = keys.integer("attention.head_count")
    hidden_size = keys.integer("embedding_length")
    head_dim = _head_dim(keys, hidden_size, num_heads)
    config: dict[str, Any] = {
        "architectures": [architecture.hf_class],
        "model_type": architecture.model_type,
        "vocab_size": _vocab_size(keys, tensors),
        "hidden_size": hidden_size,
        "intermediate_size": keys.integer("feed_forward_length"),
        # A wild number must not get as far as a list of layers.
        "num_hidden_layers": keys.integer("block_count", maximum=1 << 14),
        "num_attention_heads": num_heads,
        "num_key_value_heads": keys.integer("attention.head_count_kv", num_heads),
        "head_dim": head_dim,
        "max_position_embeddings": keys.integer("context_length"),
        "tie_word_embeddings": "output.weight" not in tensors,
        **architecture.constants,
        **{key: keys.positive(name) for key, name in architecture.numbers.items()},
        **{key: tensor in tensors for key, tensor in architecture.flags.items()},
    }
    optional = {key: name for key, name in architecture.optional.items() if name in keys}
    config |= {key: keys.positive(name) for key, name in optional.items()}
    if architecture.head_scaled_layers:
        is_scaled = config["num_hidden_layers"] == architecture.head_scaled_layers
        config["query_pre_attn_scalar"] = hidden_size // num_heads if is_scaled else head_dim
    config |= _windows(keys, architecture, config["num_hidden_layers"])
    if architecture.has_rope:
        config |= gguf_rope(keys, head_dim, architecture.rotary_part, rope_factors or {})
    keys.finish()
    return config


def _architecture(metadata: Mapping[str, Any]) -> tuple[GgufArchitecture, ModelKeys]:
    kind = metadata.get("general.type", "model")
    if kind != "model":
        raise CheckpointError(f"general.type is {kind!r}; only whole models can be compiled")
    name = metadata.get("general.architecture")
    if not isinstance(name, str) or name not in ARCHITECTURES:
        raise CheckpointError(
            f"general.architecture is {name!r}; supported in GGUF files are "
            f"{', '.join(ARCHITECTURES)}"
        )
    fitting = [
        variant
        for variant in ARCHITECTURES[name]
        if not variant.when or metadata.get(f"{name}.{variant.when}")
    ]
    return fitting[0], ModelKeys(name, metadata)


def _vocab_size(keys: ModelKeys, tensors: Mapping[str, TensorInfo]) -> int:
    embedding = tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise CheckpointError("tensor 'token_embd.weight' is missing or isn't a matrix")
    rows = embedding.shape[0]
    stated = keys.integer("vocab_size", rows)
    if stated != rows:
        raise CheckpointError(
            f"the metadata says vocab_size {stated}, but token_embd.weight has {rows} rows"
        )
    return rows


def _head_dim(keys: ModelKeys, hidden_size: int, num_heads: int) -> int:
    if keys.get("attention.key_length") is None and hidden_size % num_heads:
        raise CheckpointError(
            f"embedding_length {hidden_size} isn't a multiple of attention.head_count {num_heads}"
        )
    head_dim = keys.integer("attention.key_length", hidden_size // num_heads)
    value_dim = keys.integer("attention.value_length", head_dim)
    if value_dim != head_dim:
        raise CheckpointError(
            f"heads of {head_dim} keys and {value_dim} values are not yet supported; both must be "
            "equal"
        )
    return head_dim


def _windows(keys: ModelKeys, architecture: GgufArchitecture, num_layers: int) -> dict[str, Any]:
    """The sliding window, and where a family has both kinds of layer, which ones slide."""
    window = keys.get("attention.sliding_window") or None
    if window is not None:
        window = keys.integer("attention.sliding_window")
    if not architecture.full_every:
        if window is None:
            return {}
        return {"sliding_window": window, **architecture.with_window}
    slides = _sliding_layers(keys, architecture.full_every, num_layers)
    types = [_SLIDING if window and slide else _FULL for slide in slides]
    return {"sliding_window": window, "layer_types": types}


def _sliding_layers(keys: ModelKeys, full_every: int, num_layers: int) -> list[bool]:
    """From sliding_window_pattern: a list of booleans, or the interval of the full layers."""
    pattern = keys.raw("attention.sliding_window_pattern")
    if pattern is None:
        pattern = full_every
    if type(pattern) is int and pattern > 0:
        return [layer % pattern != 0 for layer in range(1, num_layers + 1)]
    if not isinstance(pattern, list) or len(pattern) != num_layers or {*pattern} - {True, False}:
        raise CheckpointError(
            f"attention.sliding_window_pattern is {pattern!r}, neither an interval nor a list of "
            f"{num_layers} booleans, one for each layer"
        )
    return [bool(slides) for slides in pattern]
