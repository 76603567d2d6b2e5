"""A model in rotated coordinates: the same function, whose weights and activations are easier to
round.

What layers add to, and read through norms, is rotated as a whole, and so are the values of every
head (Ashkboos et al., "QuaRot: Outlier-Free 4-Bit Inference in Rotated LLMs", 2024, without the
rotations that a step would have to compute). An RMS norm sees lengths alone, which don't change,
once its weight has moved into the linears that follow it. All of it is folded into weights.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from llmbuild.builder.models.canonical import HEAD, Shape, expected_tensors
from llmbuild.builder.models.config import DecoderConfig
from llmbuild.errors import RecipeError
from llmbuild.quant.grid import QuantisedMatrix, WeightGrid
from llmbuild.quant.reader import Tensors
from llmbuild.quant.rotation import Floats, Rotation

_TABLES = {"embed", "position_embed"}
_NORMS = {"attn_norm", "mlp_norm", "final_norm"}
_READERS_OF_ATTENTION = {"q_proj", "k_proj", "v_proj"}
_READERS_OF_MLP = {"gate_proj", "up_proj", "gate_up", "router", "shared_gate"}
_WRITERS = {"o_proj", "down_proj", "down"}


class ModelTensors(Tensors, Protocol):
    """A model's tensors, all of whose names are known."""

    @property
    def names(self) -> Mapping[str, Shape]: ...


def rotated_config(config: DecoderConfig) -> DecoderConfig:
    """Of the model in rotated coordinates, where a head has the last norm's weight in it and an
    embedding hasn't. Raises RecipeError for a model that can't be rotated."""
    norm, reason = config.norm, ""
    if norm.kind != "rms" or norm.bias:
        reason = "its norms subtract a mean or add a bias"
    elif config.post_norm or not config.pre_norm:
        reason = "it has norms after attention and MLP, whose weights can't be moved"
    if reason:
        raise RecipeError(
            f"quantisation.rotation: given true; a model of the family {config.family} can't be "
            f"rotated, as {reason}; leave it out"
        )
    return replace(config, tie_embeddings=False)


class RotatedTensors:
    """The tensors of a model in rotated coordinates, each rotated when it is read, in fp32. None
    lies on a grid that a checkpoint may have."""

    def __init__(self, tensors: ModelTensors, config: DecoderConfig) -> None:
        """config: of the model as the checkpoint has it, one that rotated_config takes."""
        self.names: Mapping[str, Shape] = expected_tensors(rotated_config(config))
        self._tensors, self._config = tensors, config
        self._residual = Rotation(config.hidden_size)
        self._head = Rotation(config.head_dim)

    def shape(self, name: str) -> Shape:
        return self.names[name]

    def read(self, name: str) -> Floats:
        return self._rotated(name, self._tensors.read(name))

    def has_rows(self, name: str) -> bool:
        """Rows that are rotated with each other can't be read alone."""
        mixes_rows = len(self.names[name]) == 2 and _part(name) in {*_WRITERS, "v_proj"}
        return not mixes_rows and self._tensors.has_rows(name)

    def read_rows(self, name: str, begin: int, end: int) -> Floats:
        if not self.has_rows(name):
            return self.read(name)[begin:end].copy()
        return self._rotated(name, self._tensors.read_rows(name, begin, end))

    def stored_grid(self, name: str) -> WeightGrid | None:
        return None

    def read_codes(self, name: str, rows: tuple[int, int] | None = None) -> QuantisedMatrix:
        raise AssertionError("no tensor has a stored grid")

    def _rotated(self, name: str, stored: NDArray[np.generic]) -> Floats:
        values: Floats = stored.astype(np.float32, copy=False)
        part = _part(name)
        if name.endswith(".bias"):
            return self._rotated_bias(part, values)
        if part in _NORMS:
            return np.ones_like(values)
        if part in _TABLES:
            return self._residual.columns(values)
        if part in _READERS_OF_ATTENTION or part in _READERS_OF_MLP or name == HEAD:
            values = self._residual.columns(values * self._norm_weight(name, part))
            return self._head.columns(values.T).T.copy() if part == "v_proj" else values
        if part in _WRITERS:
            values = self._residual.rows(values)
            return self._head.columns(values) if part == "o_proj" else values
        return values  # norms of Q and K, sinks

    def _rotated_bias(self, part: str, values: Floats) -> Floats:
        if part in _WRITERS:
            return self._residual.columns(values)
        return self._head.columns(values) if part == "v_proj" else values

    def _norm_weight(self, name: str, part: str) -> Floats:
        """Of the norm that a linear reads through."""
        if name == HEAD:
            norm = "final_norm.weight"
        else:
            is_shared = part in _READERS_OF_ATTENTION or self._config.shared_norm
            layer = ".".join(name.split(".")[:2])
            norm = f"{layer}.{'attn_norm' if is_shared else 'mlp_norm'}.weight"
        return self._tensors.read(norm).astype(np.float32)


def _part(name: str) -> str:
    """Which part of the model a tensor is: layers.0.attention.q_proj.weight is of a q_proj."""
    return name.removesuffix(".weight").removesuffix(".bias").rsplit(".", 1)[-1]
