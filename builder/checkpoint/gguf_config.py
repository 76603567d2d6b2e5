"""GGUF metadata -> a Hugging Face style config dict."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from llmbuild.builder.checkpoint.base import TensorInfo
from llmbuild.errors import CheckpointError

_ARCHITECTURES: Mapping[str, str] = {
    "llama": "LlamaForCausalLM",  # Mistral's GGUFs say llama too
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}

# Keys that say nothing about the computation, without "{architecture}.".
_IRRELEVANT = (
    "tensor_data_layout",  # names the source of the rows' order, which GGUF fixes anyhow
    "rope.scaling.finetuned",  # history: the scaling itself is stated by the other keys
)

# Keys of which one value alone is supported, and what another one would mean.
_FIXED: Mapping[str, tuple[Any, str]] = {
    "expert_count": (0, "mixture-of-experts models"),
    "expert_used_count": (0, "mixture-of-experts models"),
    "attention.causal": (True, "models without a causal mask"),
    "use_parallel_residual": (False, "parallel residuals"),
}


def gguf_config(
    metadata: Mapping[str, Any],
    tensors: Mapping[str, TensorInfo],
    rope_factors: Sequence[float] | None = None,
) -> dict[str, Any]:
    """The model config that the file's metadata and tensor list describe.

    rope_factors: the divisors in tensor rope_freqs.weight, one per rotary frequency, if stored.
    Raises CheckpointError for another architecture, and for any "{architecture}.*" key that is
    missing, malformed, or not understood.
    """
    architecture = _architecture(metadata)
    keys = _ModelKeys(architecture, metadata)
    for name, (value, meaning) in _FIXED.items():
        keys.expect(name, value, meaning)
    num_heads = keys.integer("attention.head_count")
    hidden_size = keys.integer("embedding_length")
    head_dim = _head_dim(keys, hidden_size, num_heads)
    config: dict[str, Any] = {
        "architectures": [_ARCHITECTURES[architecture]],
        "model_type": architecture,
        "vocab_size": _vocab_size(keys, tensors),
        "hidden_size": hidden_size,
        "intermediate_size": keys.integer("feed_forward_length"),
        "num_hidden_layers": keys.integer("block_count"),
        "num_attention_heads": num_heads,
        "num_key_value_heads": keys.integer("attention.head_count_kv", num_heads),
        "head_dim": head_dim,
        "hidden_act": "silu",  # of every architecture above
        "rms_norm_eps": keys.number("attention.layer_norm_rms_epsilon"),
        "rope_theta": keys.number("rope.freq_base", 10000.0),
        "rope_scaling": _rope_scaling(keys, head_dim, rope_factors),
        "max_position_embeddings": keys.integer("context_length"),
        "tie_word_embeddings": "output.weight" not in tensors,
        "attention_bias": "blk.0.attn_q.bias" in tensors,
    }
    if "blk.0.ffn_gate.bias" in tensors:
        config["mlp_bias"] = True
    config |= _sliding_window(keys, architecture)
    keys.refuse_rest()
    return config


class _ModelKeys:
    """The "{architecture}.*" keys; remembers which were asked for."""

    def __init__(self, architecture: str, metadata: Mapping[str, Any]) -> None:
        self._prefix = f"{architecture}."
        self._metadata = metadata
        self._used = {self._prefix + name for name in _IRRELEVANT}

    def get(self, name: str, default: Any = None) -> Any:
        """The raw value; of a list with one value per layer, the value they share."""
        key = self._prefix + name
        self._used.add(key)
        value = self._metadata.get(key, default)
        if not isinstance(value, list):
            return value
        if not value or any(item != value[0] for item in value):
            raise CheckpointError(
                f"{key} differs between layers ({value}), which is not yet supported"
            )
        return value[0]

    def integer(self, name: str, default: int | None = None) -> int:
        value = self._required(name, default)
        if type(value) is not int or value < 1:
            raise CheckpointError(f"{self._prefix}{name} is {value!r}, not a positive integer")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        value = self._required(name, default)
        if type(value) not in (int, float) or not math.isfinite(value) or value <= 0:
            raise CheckpointError(f"{self._prefix}{name} is {value!r}, not a positive number")
        return shortest_float32(value)

    def expect(self, name: str, expected: Any, meaning: str) -> None:
        value = self.get(name, expected)
        if value != expected:
            raise CheckpointError(
                f"{self._prefix}{name} is {value!r}: {meaning} are not yet supported"
            )

    def names_below(self, prefix: str) -> list[str]:
        start = self._prefix + prefix
        return [key.removeprefix(self._prefix) for key in self._metadata if key.startswith(start)]

    def refuse_rest(self) -> None:
        rest = sorted(
            key for key in self._metadata if key.startswith(self._prefix) and key not in self._used
        )
        if rest:
            raise CheckpointError(
                f"metadata that isn't understood, so that the model can't be computed with "
                f"certainty: {', '.join(f'{key} = {self._metadata[key]!r}' for key in rest)}"
            )

    def _required(self, name: str, default: float | None) -> Any:
        value = self.get(name, default)
        if value is None:
            raise CheckpointError(f"metadata {self._prefix}{name} is missing")
        return value


def shortest_float32(value: float) -> float:
    """The shortest decimal that float32 can't tell from `value`: 9.999999747378752e-06, which is
    how a file's float32 reads, back to 1e-05."""
    return float(str(np.float32(value)))


def _architecture(metadata: Mapping[str, Any]) -> str:
    kind = metadata.get("general.type", "model")
    if kind != "model":
        raise CheckpointError(f"general.type is {kind!r}; only whole models can be compiled")
    architecture = metadata.get("general.architecture")
    if architecture not in _ARCHITECTURES:
        raise CheckpointError(
            f"general.architecture is {architecture!r}; supported in GGUF files are "
            f"{', '.join(_ARCHITECTURES)}"
        )
    return str(architecture)


def _vocab_size(keys: _ModelKeys, tensors: Mapping[str, TensorInfo]) -> int:
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


def _head_dim(keys: _ModelKeys, hidden_size: int, num_heads: int) -> int:
    if keys.get("attention.key_length") is None and hidden_size % num_heads:
        raise CheckpointError(
            f"embedding_length {hidden_size} isn't a multiple of attention.head_count {num_heads}"
        )
    head_dim = keys.integer("attention.key_length", hidden_size // num_heads)
    value_dim = keys.integer("attention.value_length", head_dim)
    rotary_dim = keys.integer("rope.dimension_count", head_dim)
    if value_dim != head_dim or rotary_dim != head_dim:
        raise CheckpointError(
            f"heads of {head_dim} keys, {value_dim} values and {rotary_dim} rotated elements are "
            "not yet supported; all three must be equal"
        )
    return head_dim


def _rope_scaling(
    keys: _ModelKeys, head_dim: int, factors: Sequence[float] | None
) -> dict[str, Any] | None:
    """None, or a rope_scaling dict. A factor without a type is linear, as in llama.cpp."""
    kind = keys.get("rope.scaling.type", "linear")
    if kind not in ("linear", "none"):
        return _other_scaling(keys, kind)
    early_factor = keys.number("rope.scale_linear", 1.0)  # the factor in GGUF's first files
    factor = keys.number("rope.scaling.factor", early_factor)
    keys.expect("rope.scaling.attn_factor", 1.0, "attention factors of rope scaling")
    keys.get("rope.scaling.original_context_length")  # no part of linear scaling
    scales = kind == "linear" and factor != 1
    if factors is None:
        return {"rope_type": "linear", "factor": factor} if scales else None
    if scales:
        raise CheckpointError(
            f"rope scaling is stated twice: a linear factor {factor}, and tensor rope_freqs.weight"
        )
    return {"rope_type": "factors", "factors": _checked_factors(factors, head_dim)}


def _other_scaling(keys: _ModelKeys, kind: str) -> dict[str, Any]:
    """A kind that the model family decides on, with all that the file says about it."""
    stated = {
        name.removeprefix("rope.scaling."): keys.get(name)
        for name in keys.names_below("rope.scaling.")
    }
    del stated["type"]
    return {"rope_type": kind} | stated


def _checked_factors(factors: Sequence[float], head_dim: int) -> list[float]:
    if len(factors) != head_dim // 2 or not all(math.isfinite(f) and f > 0 for f in factors):
        raise CheckpointError(
            f"tensor rope_freqs.weight must hold {head_dim // 2} positive numbers, one for each "
            f"rotary frequency, but holds {len(factors)}: {list(factors)}"
        )
    return list(factors)


def _sliding_window(keys: _ModelKeys, architecture: str) -> dict[str, Any]:
    window = keys.get("attention.sliding_window", 0)
    if not window:
        return {}
    config: dict[str, Any] = {"sliding_window": keys.integer("attention.sliding_window")}
    if architecture.startswith("qwen"):  # whose configs need to be told that the window holds
        config |= {"use_sliding_window": True, "max_window_layers": 0}
    return config
