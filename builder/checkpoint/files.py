"""Plain file reads whose failures are CheckpointErrors that name the file."""

import json
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmbuild.errors import CheckpointError

MAX_TEXT_BYTES = 1 << 28  # tokenizers of the largest vocabularies take some 10s of MB


def parse_json_object(text: bytes, origin: str) -> dict[str, Any]:
    """The JSON object in `text`; `origin` names it in errors. A repeated key is refused."""
    try:
        value = json.loads(text.decode("utf-8-sig"), object_pairs_hook=_without_repeated_keys)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{origin} isn't valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{origin} must hold a JSON object, but holds {str(value)[:40]!r}")
    return value


def read_json_object(path: Path) -> dict[str, Any]:
    """The JSON object that the file holds."""
    return parse_json_object(read_text_file(path), str(path))


def read_text_file(path: Path) -> bytes:
    """All bytes of a file of text. What isn't a file (a pipe or device could give bytes for ever)
    or holds more than MAX_TEXT_BYTES is refused."""
    try:
        if path.exists() and not path.is_file() and not path.is_dir():
            raise CheckpointError(f"{path} isn't a file")
        with path.open("rb") as file:
            text = file.read(MAX_TEXT_BYTES + 1)
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing") from None
    except OSError as error:
        raise CheckpointError(f"{path} can't be read: {error.strerror}") from error
    if len(text) > MAX_TEXT_BYTES:
        raise CheckpointError(f"{path} holds more than {MAX_TEXT_BYTES} bytes, too many")
    return text


def read_bytes(path: Path, offset: int, num_bytes: int) -> NDArray[np.uint8]:
    """`num_bytes` bytes from `offset` on: read, not mapped."""
    try:
        data = np.fromfile(path, dtype=np.uint8, count=num_bytes, offset=offset)
    except OSError as error:
        raise CheckpointError(f"{path} can't be read: {error.strerror}") from error
    if data.size != num_bytes:
        raise CheckpointError(
            f"{path} is truncated: {num_bytes} bytes expected at offset {offset}, "
            f"{data.size} are there"
        )
    return data


def _without_repeated_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value: dict[str, Any] = {}
    for key, item in pairs:
        if key in value:
            raise ValueError(f"key {key!r} is repeated")
        value[key] = item
    return value
