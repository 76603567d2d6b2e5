"""The RoPE of a GGUF file -> the keys of a Hugging Face style config."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from llmbuild.builder.checkpoint.gguf_keys import ModelKeys
from llmbuild.errors import CheckpointError

ROPE_FREQS = "rope_freqs.weight"  # a llama3 scaling, worked out
LONG_FACTORS = "rope_factors_long.weight"
SHORT_FACTORS = "rope_factors_short.weight"
ROPE_TENSORS = (ROPE_FREQS, LONG_FACTORS, SHORT_FACTORS)

_KINDS = ("none", "linear", "yarn", "longrope")


def gguf_rope(
    keys: ModelKeys, head_dim: int, rotary_part: str, factors: Mapping[str, Sequence[float]]
) -> dict[str, Any]:
    """rope_theta, rope_scaling, and under the key `rotary_part` (if that isn't "") the part of a
    head that turns. factors: of each tensor in ROPE_TENSORS that the file has. Raises
    CheckpointError for kinds of scaling that aren't supported, or are stated twice."""
    rotary_dim = keys.integer("rope.dimension_count", head_dim)
    if rotary_dim > head_dim or (rotary_dim != head_dim and not rotary_part):
        raise CheckpointError(
            f"heads of {head_dim} elements of which {rotary_dim} are rotated are not yet supported "
            "in this architecture"
        )
    config: dict[str, Any] = {"rope_theta": keys.number("rope.freq_base", 10000.0)}
    if rotary_part:
        config[rotary_part] = _part(rotary_dim, head_dim)
    checked = {name: _checked(name, values, rotary_dim) for name, values in factors.items()}
    kind = keys.get("rope.scaling.type", "linear")  # of a factor without a type, as in llama.cpp
    if kind not in _KINDS:
        raise CheckpointError(f"rope.scaling.type is {kind!r}; supported are {', '.join(_KINDS)}")
    if kind == "longrope" or LONG_FACTORS in checked or SHORT_FACTORS in checked:
        return config | _longrope(keys, checked)
    keys.expect("rope.scaling.attn_factor", 1.0, "attention factors of this kind of rope scaling")
    scaling = _yarn(keys) if kind == "yarn" else _linear(keys, kind)
    if ROPE_FREQS in checked:
        if scaling is not None:
            raise CheckpointError(
                f"rope scaling is stated twice: {scaling}, and tensor {ROPE_FREQS}"
            )
        scaling = {"rope_type": "factors", "factors": checked[ROPE_FREQS]}
    return config | {"rope_scaling": scaling}


def _linear(keys: ModelKeys, kind: str) -> dict[str, Any] | None:
    early_factor = keys.number("rope.scale_linear", 1.0)  # the factor in GGUF's first files
    factor = keys.number("rope.scaling.factor", early_factor)
    keys.get("rope.scaling.original_context_length")  # no part of linear scaling
    return {"rope_type": "linear", "factor": factor} if kind == "linear" and factor != 1 else None


def _yarn(keys: ModelKeys) -> dict[str, Any]:
    keys.expect("rope.scaling.yarn_ext_factor", 1.0, "extrapolation factors of YaRN")
    scaling: dict[str, Any] = {
        "rope_type": "yarn",
        "factor": keys.number("rope.scaling.factor"),
        "original_max_position_embeddings": keys.integer("rope.scaling.original_context_length"),
    }
    for name in ("beta_fast", "beta_slow"):
        if f"rope.scaling.yarn_{name}" in keys:
            scaling[name] = keys.number(f"rope.scaling.yarn_{name}")
    return scaling


def _longrope(keys: ModelKeys, factors: Mapping[str, list[float]]) -> dict[str, Any]:
    if factors.keys() != {LONG_FACTORS, SHORT_FACTORS}:
        raise CheckpointError(
            f"longrope scaling needs the tensors {LONG_FACTORS} and {SHORT_FACTORS} and no other "
            f"factors; the file has {', '.join(factors) or 'none'}"
        )
    scaling: dict[str, Any] = {
        "rope_type": "longrope",
        "short_factor": factors[SHORT_FACTORS],
        "long_factor": factors[LONG_FACTORS],
    }
    if "rope.scaling.attn_factor" in keys:
        scaling["attention_factor"] = keys.number("rope.scaling.attn_factor")
    original = keys.integer("rope.scaling.original_context_length")
    return {"rope_scaling": scaling, "original_max_position_embeddings": original}


def _part(rotary_dim: int, head_dim: int) -> float:
    """The quotient, such that head_dim times it has rotary_dim as its whole part."""
    part = rotary_dim / head_dim
    return part if int(head_dim * part) == rotary_dim else math.nextafter(part, 1)


def _checked(name: str, factors: Sequence[float], rotary_dim: int) -> list[float]:
    if len(factors) != rotary_dim // 2 or not all(math.isfinite(f) and f > 0 for f in factors):
        raise CheckpointError(
            f"tensor {name} must hold {rotary_dim // 2} positive numbers, one for each rotary "
            f"frequency, but holds {len(factors)}: {list(factors)}"
        )
    return list(factors)
