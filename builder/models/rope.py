"""Rotary embedding: its parameters as configs spell them, and the frequencies they stand for.

A kind is one row of KINDS: how its parameters are read, and how it bends the plain frequencies.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from llmbuild.builder.models.config import RopeConfig
from llmbuild.builder.models.config_reader import ConfigReader
from llmbuild.errors import ModelError

DEFAULT_THETA = 10_000.0


def _read_linear(section: ConfigReader, theta: float, max_position: int) -> RopeConfig:
    return RopeConfig("linear", theta, factor=section.number("factor"))


def _read_llama3(section: ConfigReader, theta: float, max_position: int) -> RopeConfig:
    low, high = section.number("low_freq_factor"), section.number("high_freq_factor")
    if high <= low:
        section.refuse("high_freq_factor", high, f"a number above low_freq_factor, {low}")
    return RopeConfig(
        "llama3",
        theta,
        factor=section.number("factor"),
        low_freq_factor=low,
        high_freq_factor=high,
        original_max_position=section.optional_integer("original_max_position_embeddings")
        or max_position,
    )


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


def _bend_by_factors(rope: RopeConfig, plain: torch.Tensor) -> torch.Tensor:
    if len(rope.factors) != len(plain):
        raise ModelError(
            f"RoPE has {len(rope.factors)} frequency factors; a head of {2 * len(plain)} "
            f"elements needs {len(plain)}."
        )
    return plain / torch.tensor(rope.factors, dtype=torch.float32, device="cpu")


@dataclass(frozen=True)
class RopeKind:
    """read: (the config's RoPE section, theta, max_position) -> RopeConfig.
    bend: (config, plain fp32 frequencies [head_dim/2]) -> fp32 frequencies [head_dim/2]."""

    read: Callable[[ConfigReader, float, int], RopeConfig]
    bend: Callable[[RopeConfig, torch.Tensor], torch.Tensor]


KINDS: dict[str, RopeKind] = {
    "default": RopeKind(lambda _, theta, __: RopeConfig("default", theta), lambda _, plain: plain),
    "linear": RopeKind(_read_linear, lambda rope, plain: plain / rope.factor),
    "llama3": RopeKind(_read_llama3, _bend_llama3),
    # GGUF files hold a llama3 scaling already worked out, as one divisor per frequency.
    "factors": RopeKind(
        lambda section, theta, _: RopeConfig("factors", theta, factors=section.numbers("factors")),
        _bend_by_factors,
    ),
}


def read_rope(reader: ConfigReader, max_position: int) -> RopeConfig:
    """RoPE of either spelling: rope_theta beside rope_scaling (with `type` or `rope_type`), or
    transformers 5's rope_parameters. Raises ModelError for unknown kinds and keys."""
    old, new = reader.section("rope_scaling"), reader.section("rope_parameters")
    if old and new:
        reader.fail("has both rope_scaling and rope_parameters; keep one")
    reader.only("partial_rotary_factor", 1.0)
    outer_theta = reader.number("rope_theta", DEFAULT_THETA)
    section = old or new
    if section is None:
        return RopeConfig("default", outer_theta)
    section.only("partial_rotary_factor", 1.0)
    theta = section.number("rope_theta", outer_theta)
    if "rope_theta" in reader and theta != outer_theta:
        section.refuse("rope_theta", theta, f"the outer rope_theta, {outer_theta}")
    kinds = tuple(KINDS)
    modern, legacy = section.text("rope_type", kinds), section.text("type", kinds)
    if modern and legacy and modern != legacy:
        section.refuse("type", legacy, f"the same as rope_type, {modern!r}")
    rope = KINDS[modern or legacy or "default"].read(section, theta, max_position)
    section.finish()
    return rope


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> NDArray[np.float32]:
    """Radians per position of each rotated pair, float32 [head_dim / 2].

    Bit-equal to transformers': theta's powers come from torch, since numpy's float32 power
    rounds otherwise. Raises ModelError for an unknown kind. Scalings: "linear", Chen et al.,
    "Extending Context Window of LLMs via Positional Interpolation", 2023; "llama3", Llama 3.1.
    """
    if rope.kind not in KINDS:
        raise ModelError(f"RoPE kind is {rope.kind!r}; allowed is one of {', '.join(KINDS)}.")
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32, device="cpu") / head_dim
    frequencies = KINDS[rope.kind].bend(rope, 1.0 / rope.theta**exponents)
    return np.asarray(frequencies.numpy(), dtype=np.float32)
