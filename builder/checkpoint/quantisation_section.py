"""Reads the quantization_config of a Hugging Face config.json key by key, so that nothing in it
that changes what the stored codes mean can pass unseen."""

from collections.abc import Iterable, Sequence
from typing import Any, NoReturn, TypeVar

from llmbuild.errors import CheckpointError

T = TypeVar("T")

REQUIRED = object()


class Section:
    """One JSON object: take each key with its check, then `finish`.

    Every method raises CheckpointError that names the key, what was given and what is allowed.
    path: where the object stands, for messages ("quantization_config").
    """

    def __init__(self, raw: object, path: str) -> None:
        if not isinstance(raw, dict):
            raise CheckpointError(f"{path} is {raw!r}; it must be an object")
        self.path = path
        self._raw: dict[str, Any] = raw
        self._taken: set[str] = set()

    def __contains__(self, key: str) -> bool:
        return self._raw.get(key) is not None

    def take(self, key: str, default: object = None) -> Any:
        """The value of a key as it is; null is as good as absent."""
        self._taken.add(key)
        value = self._raw.get(key)
        if value is None and default is REQUIRED:
            raise CheckpointError(f"{self.path} lacks {key}; add what the model was quantised with")
        return default if value is None else value

    def one_of(self, key: str, allowed: Sequence[T], default: object = REQUIRED) -> T:
        """A value that is one of those allowed, and of that one's type."""
        value = self.take(key, default)
        found = [each for each in allowed if type(value) is type(each) and value == each]
        if not found:
            self.refuse(key, value, f"{', '.join(map(repr, allowed))} can be read")
        return found[0]

    def group_size(self, key: str, default: object = REQUIRED) -> int:
        """Columns that share a scale, 0 for the whole row, which is stored as -1."""
        value = self.take(key, default)
        if type(value) is not int or not (value == -1 or 0 < value < 1 << 31):
            self.refuse(key, value, "it must be a number of columns, or -1 for whole rows")
        return max(value, 0)

    def texts(self, key: str) -> list[str]:
        """A list of texts; empty if it is absent."""
        value = self.take(key, [])
        if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
            self.refuse(key, value, "it must be a list of texts")
        return value

    def refuse(self, key: str, value: object, allowed: str) -> NoReturn:
        raise CheckpointError(f"{self.path}.{key} is {value!r}; {allowed}")

    def finish(self, carry_nothing: Iterable[str] = ()) -> None:
        """Refuses keys that were not taken and aren't among those that change no code's meaning."""
        left = {key for key, value in self._raw.items() if value is not None}
        unknown = sorted(left - self._taken - set(carry_nothing))
        if unknown:
            given = ", ".join(f"{key} ({self._raw[key]!r})" for key in unknown)
            raise CheckpointError(
                f"{self.path} has keys whose meaning isn't known: {given}; remove them if they "
                "don't change what the stored weights stand for"
            )
