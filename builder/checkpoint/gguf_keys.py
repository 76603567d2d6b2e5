"""The metadata of a GGUF file that describes its model, read key by key."""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from llmbuild.errors import CheckpointError

MAX_INTEGER = (1 << 31) - 1  # kernels index with int32

# Keys that say nothing about the computation, without "{architecture}.".
_IRRELEVANT = (
    "tensor_data_layout",  # names the source of the rows' order, which GGUF fixes anyhow
    "rope.scaling.finetuned",  # history: the scaling itself is stated by the other keys
)

# Keys of which one value alone is supported where an architecture doesn't read them, and what
# another one would mean.
_FIXED: Mapping[str, tuple[Any, str]] = {
    "expert_count": (0, "mixture-of-experts models"),
    "expert_used_count": (0, "mixture-of-experts models"),
    "expert_gating_func": (1, "gating functions other than softmax"),
    "attention.causal": (True, "models without a causal mask"),
    "use_parallel_residual": (False, "parallel residuals"),
}


class ModelKeys:
    """The "{architecture}.*" keys; remembers which were asked for."""

    def __init__(self, architecture: str, metadata: Mapping[str, Any]) -> None:
        self._prefix = f"{architecture}."
        self._metadata = metadata
        self._used = {self._prefix + name for name in _IRRELEVANT}

    def __contains__(self, name: str) -> bool:
        return self._prefix + name in self._metadata

    def raw(self, name: str) -> Any:
        """The value as it stands; None if there is none."""
        self._used.add(self._prefix + name)
        return self._metadata.get(self._prefix + name)

    def get(self, name: str, default: Any = None) -> Any:
        """The value; of a list with one value per layer, the value they share."""
        value = self.raw(name)
        if value is None:
            return default
        if not isinstance(value, list):
            return value
        if not value or any(item != value[0] for item in value):
            raise CheckpointError(
                f"{self._prefix}{name} differs between layers ({value}), which is not yet supported"
            )
        return value[0]

    def integer(self, name: str, default: int | None = None, maximum: int = MAX_INTEGER) -> int:
        value = self._required(name, default)
        if type(value) is not int or not 1 <= value <= maximum:
            raise CheckpointError(
                f"{self._prefix}{name} is {value!r}, not an integer from 1 to {maximum}"
            )
        return value

    def number(self, name: str, default: float | None = None) -> float:
        return float(self.positive(name, default))

    def positive(self, name: str, default: float | None = None) -> int | float | bool:
        """A number above 0, an integer where one is stored; or a boolean."""
        value = self._required(name, default)
        if type(value) is bool:
            return value
        if type(value) not in (int, float) or not math.isfinite(value) or value <= 0:
            raise CheckpointError(f"{self._prefix}{name} is {value!r}, not a positive number")
        return value if type(value) is int else shortest_float32(value)

    def expect(self, name: str, expected: Any, meaning: str) -> None:
        value = self.get(name, expected)
        if value != expected:
            raise CheckpointError(
                f"{self._prefix}{name} is {value!r}: {meaning} are not yet supported"
            )

    def finish(self) -> None:
        """Refuses what wasn't asked for."""
        for name, (value, meaning) in _FIXED.items():
            if self._prefix + name not in self._used:
                self.expect(name, value, meaning)
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
