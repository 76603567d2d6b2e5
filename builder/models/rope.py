"""Rotary embedding: its parameters as configs spell them, and the frequencies they stand for.

A kind is one row of KINDS: how its parameters are read, and how it bends the plain frequencies.
Scalings: "linear", Chen et al., "Extending Context Window of LLMs via Positional Interpolation",
2023; "llama3", Llama 3.1; "yarn", Peng et al., "YaRN", 2023; "longrope", Ding et al., "LongRoPE",
2024; "dynamic", NTK-aware scaling.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from llmbuild.builder.models.config import RopeConfig
from llmbuild.builder.models.config_reader import ConfigReader
from llmbuild.errors import ModelError
from llmbuild.plugins.rope_table.op import (
    dynamic_rope_table,
    rope_table,
    switched_rope_table,
)

DEFAULT_THETA = 10_000.0


@dataclass(frozen=True)
class RopeContext:
    """What reading a kind's parameters needs beside its own section."""

    theta: float
    rotary_dim: int
    max_position: int  # max_position_embeddings
    original_max_position: int | None  # where it stands beside the section, as in Phi-3


def _read_linear(section: ConfigReader, context: RopeContext) -> RopeConfig:
    return RopeConfig("linear", context.theta, context.rotary_dim, factor=section.number("factor"))


def _read_llama3(section: ConfigReader, context: RopeContext) -> RopeConfig:
    low, high = section.number("low_freq_factor"), section.number("high_freq_factor")
    if high <= low:
        section.refuse("high_freq_factor", high, f"a number above low_freq_factor, {low}")
    return RopeConfig(
        "llama3",
        context.theta,
        context.rotary_dim,
        factor=section.number("factor"),
        low_freq_factor=low,
        high_freq_factor=high,
        original_max_position=section.optional_integer("original_max_position_embeddings")
        or context.max_position,
    )


def _read_factors(section: ConfigReader, context: RopeContext) -> RopeConfig:
    factors = _factors(section, "factors", context)
    return RopeConfig("factors", context.theta, context.rotary_dim, factors=factors)


def _read_dynamic(section: ConfigReader, context: RopeContext) -> RopeConfig:
    section.optional_integer("original_max_position_embeddings")  # transformers doesn't use it
    return RopeConfig(
        "dynamic",
        context.theta,
        context.rotary_dim,
        factor=section.number("factor"),
        original_max_position=context.max_position,
    )


def _read_yarn(section: ConfigReader, context: RopeContext) -> RopeConfig:
    original = _original_length(section, context)
    factor = section.optional_number("factor") or context.max_position / original
    scale, scale_all = section.optional_number("mscale"), section.optional_number("mscale_all_dim")
    given = section.optional_number("attention_factor")
    if given is None and scale and scale_all:
        given = _yarn_attention(factor, scale) / _yarn_attention(factor, scale_all)
    return RopeConfig(
        "yarn",
        context.theta,
        context.rotary_dim,
        factor=factor,
        original_max_position=original,
        beta_fast=section.optional_number("beta_fast") or 32.0,
        beta_slow=section.optional_number("beta_slow") or 1.0,
        truncate=section.boolean("truncate", True),
        attention_factor=_yarn_attention(factor) if given is None else given,
    )


def _read_longrope(section: ConfigReader, context: RopeContext) -> RopeConfig:
    original = _original_length(section, context)
    factor = section.optional_number("factor") or context.max_position / original
    attention = section.optional_number("attention_factor")
    if attention is None:
        attention = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
    return RopeConfig(
        "longrope",
        context.theta,
        context.rotary_dim,
        factor=factor,
        factors=_factors(section, "short_factor", context),
        long_factors=_factors(section, "long_factor", context),
        original_max_position=original,
        attention_factor=attention,
    )


def _original_length(section: ConfigReader, context: RopeContext) -> int:
    inside = section.optional_integer("original_max_position_embeddings")
    return inside or context.original_max_position or context.max_position


def _factors(section: ConfigReader, key: str, context: RopeContext) -> tuple[float, ...]:
    factors = section.numbers(key)
    if len(factors) != context.rotary_dim // 2:
        section.refuse(
            key, f"a list of {len(factors)}", f"one of {context.rotary_dim // 2}, one a frequency"
        )
    return factors


def _yarn_attention(factor: float, scale: float = 1.0) -> float:
    return 0.1 * scale * math.log(factor) + 1.0 if factor > 1 else 1.0


def _bend_llama3(rope: RopeConfig, plain: torch.Tensor) -> torch.Tensor:
    """Llama 3.1's scaling: waves longer than the original context are slowed by `factor`,
    short ones are kept, and those between are blended by how often they fit into it."""
    original, low, high = rope.original_max_position, rope.low_freq_factor, rope.high_freq_factor
    wavelength = 2 * math.pi / plain
    blend = (original / wavelength - low) / (high - low)
    # The order of these operations is that of transformers, to the last bit in fp32.
    blended = (1 - blend) * plain / rope.factor + blend * plain
    slowed = torch.where(wavelength > original / low, plain / rope.factor, blended)
    return torch.where(wavelength < original / high, plain, slowed)


def _bend_yarn(rope: RopeConfig, plain: torch.Tensor) -> torch.Tensor:
    """Slow waves are slowed by `factor`, fast ones kept, with a linear ramp between."""
    dim, count = rope.rotary_dim, len(plain)

    def dimension(turns: float) -> float:
        """Where a wave turns so often within the original context."""
        spread = math.log(rope.original_max_position / (turns * 2 * math.pi))
        return dim * spread / (2 * math.log(rope.theta))

    low, high = dimension(rope.beta_fast), dimension(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    high = high + 0.001 if low == high else high
    ramp = ((torch.arange(count, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    kept = 1 - ramp
    waves = 1.0 / plain
    return (1.0 / (rope.factor * waves)) * (1 - kept) + plain * kept


def _bend_by_factors(rope: RopeConfig, plain: torch.Tensor) -> torch.Tensor:
    return plain / torch.tensor(rope.factors, dtype=torch.float32, device="cpu")


def _bend_longrope(rope: RopeConfig, plain: torch.Tensor) -> torch.Tensor:
    """Two rows: for sequences within the original context, and for longer ones."""
    factors = torch.tensor((rope.factors, rope.long_factors), dtype=torch.float32, device="cpu")
    return 1.0 / (factors * (1.0 / plain))


@dataclass(frozen=True)
class RopeKind:
    """read: a config's RoPE section -> RopeConfig. bend: (config, plain fp32 frequencies [R/2])
    -> fp32 frequencies [R/2], or [2, R/2] where a sequence's length chooses between two."""

    read: Callable[[ConfigReader, RopeContext], RopeConfig]
    bend: Callable[[RopeConfig, torch.Tensor], torch.Tensor]


def _read_default(_: ConfigReader, context: RopeContext) -> RopeConfig:
    return RopeConfig("default", context.theta, context.rotary_dim)


KINDS: dict[str, RopeKind] = {
    "default": RopeKind(_read_default, lambda _, plain: plain),
    "linear": RopeKind(_read_linear, lambda rope, plain: plain / rope.factor),
    "llama3": RopeKind(_read_llama3, _bend_llama3),
    "yarn": RopeKind(_read_yarn, _bend_yarn),
    "longrope": RopeKind(_read_longrope, _bend_longrope),
    # Its frequencies follow from a sequence's length, in the op itself.
    "dynamic": RopeKind(_read_dynamic, lambda _, plain: plain),
    # GGUF files hold a llama3 scaling already worked out, as one divisor per frequency.
    "factors": RopeKind(_read_factors, _bend_by_factors),
}
_ALIASES = {"su": "longrope"}  # as early Phi-3 configs spell it


def read_rope(
    reader: ConfigReader,
    head_dim: int,
    *,
    default_theta: float = DEFAULT_THETA,
    default_part: float = 1.0,
) -> RopeConfig:
    """RoPE of either spelling: rope_theta beside rope_scaling (with `type` or `rope_type`), or
    transformers 5's rope_parameters. default_part: of a head that turns, where the config doesn't
    say. Raises ModelError for unknown kinds and keys."""
    old, new = reader.section("rope_scaling"), reader.section("rope_parameters")
    if old and new:
        reader.fail("has both rope_scaling and rope_parameters; keep one")
    original = reader.optional_integer("original_max_position_embeddings")
    outer_theta = reader.number("rope_theta", default_theta)
    outer_part = reader.number("partial_rotary_factor", default_part)
    section = old or new
    if section is None:
        section = ConfigReader({}, reader.family)
    theta = section.number("rope_theta", outer_theta)
    if "rope_theta" in reader and theta != outer_theta:
        section.refuse("rope_theta", theta, f"the outer rope_theta, {outer_theta}")
    part = section.number("partial_rotary_factor", outer_part)
    if "partial_rotary_factor" in reader and part != outer_part:
        section.refuse("partial_rotary_factor", part, f"the outer one, {outer_part}")
    max_position = reader.integer("max_position_embeddings")
    context = RopeContext(theta, rotary_dim(section, head_dim, part), max_position, original)
    return read_section(section, context)


def rotary_dim(reader: ConfigReader, head_dim: int, part: float) -> int:
    """Elements of a head that turn: the whole part of head_dim * part, which must be even."""
    turning = int(head_dim * part)
    if part > 1 or turning % 2 or not turning:
        reader.refuse(
            "partial_rotary_factor", part, f"at most 1, with an even part of head_dim {head_dim}"
        )
    return turning


def read_section(section: ConfigReader, context: RopeContext) -> RopeConfig:
    """The kind that a RoPE section names, with its parameters; this ends the section."""
    kinds = (*KINDS, *_ALIASES)
    modern, legacy = section.text("rope_type", kinds), section.text("type", kinds)
    if modern and legacy and modern != legacy:
        section.refuse("type", legacy, f"the same as rope_type, {modern!r}")
    kind = modern or legacy or "default"
    rope = KINDS[_ALIASES.get(kind, kind)].read(section, context)
    section.finish()
    return rope


def inverse_frequencies(rope: RopeConfig) -> NDArray[np.float32]:
    """Radians per position of each rotated pair, float32 [R/2], or [2, R/2] for longrope.

    Bit-equal to transformers': theta's powers come from torch, since numpy's float32 power
    rounds otherwise. Raises ModelError for an unknown kind.
    """
    if rope.kind not in KINDS:
        raise ModelError(f"RoPE kind is {rope.kind!r}; allowed is one of {', '.join(KINDS)}.")
    steps = torch.arange(0, rope.rotary_dim, 2, dtype=torch.float32, device="cpu")
    frequencies = KINDS[rope.kind].bend(rope, 1.0 / rope.theta ** (steps / rope.rotary_dim))
    return np.asarray(frequencies.numpy(), dtype=np.float32)


class RotaryTable(nn.Module):
    """A step's cosines and sines for one RopeConfig; the buffer inv_freq is named only, its
    values come by load_state_dict."""

    def __init__(self, rope: RopeConfig) -> None:
        super().__init__()
        self.rope = rope
        if rope.kind != "dynamic":
            half = rope.rotary_dim // 2
            shape = (2, half) if rope.kind == "longrope" else (half,)
            self.register_buffer("inv_freq", torch.empty(shape))

    def forward(
        self, positions: torch.Tensor, query_start: torch.Tensor, kv_lengths: torch.Tensor
    ) -> torch.Tensor:
        """int32 [T], [S+1], [S] -> fp32 [T, R]: cosines, then sines."""
        rope, scale = self.rope, self.rope.attention_factor
        where = (positions, query_start, kv_lengths)
        if rope.kind == "dynamic":
            shape = (rope.rotary_dim, rope.theta, rope.factor, rope.original_max_position)
            return dynamic_rope_table(*where, *shape, scale)
        if rope.kind == "longrope":
            return switched_rope_table(*where, self.inv_freq, rope.original_max_position, scale)
        return rope_table(positions, self.inv_freq, scale)
