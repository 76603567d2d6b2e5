"""The GGUF container: metadata and tensor directory, read without mapping the file.

Layout (ggml's gguf.md, versions 2 and 3): magic, version, tensor count, metadata count; the
metadata as key, type, value; per tensor its name, dimensions (fastest first), type and offset;
then the data, aligned to general.alignment.
"""

import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFValueType

from llmbuild.errors import CheckpointError

MAGIC = b"GGUF"
READABLE_TYPES = (
    *("F32", "F16", "BF16"),
    *("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K"),
)
_TENSOR_TYPES = {kind.value: kind for kind in GGMLQuantizationType}
_VERSIONS = (2, 3)
_DEFAULT_ALIGNMENT = 32
_MAX_DIMENSIONS = 4

_SCALARS: Mapping[GGUFValueType, str] = {
    GGUFValueType.UINT8: "<u1",
    GGUFValueType.INT8: "<i1",
    GGUFValueType.UINT16: "<u2",
    GGUFValueType.INT16: "<i2",
    GGUFValueType.UINT32: "<u4",
    GGUFValueType.INT32: "<i4",
    GGUFValueType.FLOAT32: "<f4",
    GGUFValueType.BOOL: "?",
    GGUFValueType.UINT64: "<u8",
    GGUFValueType.INT64: "<i8",
    GGUFValueType.FLOAT64: "<f8",
}


@dataclass(frozen=True)
class GgufTensor:
    """shape: row-major, the reverse of the file's order; offset: from the start of the file."""

    shape: tuple[int, ...]
    type: GGMLQuantizationType
    offset: int
    num_bytes: int

    def rows(self, begin: int, end: int) -> "GgufTensor":
        """Some rows of a tensor of several dimensions, whose rows are of whole blocks."""
        count, *row_shape = self.shape
        assert row_shape
        assert 0 <= begin <= end <= count
        row_bytes = self.num_bytes // count
        shape = (end - begin, *row_shape)
        offset = self.offset + begin * row_bytes
        return GgufTensor(shape, self.type, offset, (end - begin) * row_bytes)


@dataclass(frozen=True)
class GgufFile:
    """The parsed head of a GGUF file. metadata: str, int, float, bool, or a list of one of them."""

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, GgufTensor]


def read_gguf(path: Path) -> GgufFile:
    """Reads the file's head and checks it against the file's size.

    Raises CheckpointError for a file that isn't GGUF, is truncated, big-endian or of another
    version, is one part of a split model, or has a tensor type outside READABLE_TYPES.
    """
    try:
        with path.open("rb") as file:
            cursor = _Cursor(path, file)
            num_tensors, num_entries = _read_preamble(cursor)
            metadata = _read_metadata(cursor, num_entries)
            _refuse_split(path, metadata)
            directory = _read_directory(cursor, num_tensors)
            alignment = _alignment(path, metadata)
            data_start = -(-file.tell() // alignment) * alignment
            tensors = {
                name: _place_tensor(path, name, entry, data_start, alignment)
                for name, entry in directory.items()
            }
            _check_ranges(path, tensors, cursor.file_bytes)
    except OSError as error:
        raise CheckpointError(f"{path} can't be read: {error.strerror}") from error
    return GgufFile(path, metadata, tensors)


class _Cursor:
    """Reads little-endian values in order and refuses to run past the end of the file."""

    def __init__(self, path: Path, file: BinaryIO) -> None:
        self.path = path
        self.file_bytes = path.stat().st_size
        self._file = file

    def take(self, num_bytes: int) -> bytes:
        self.require(num_bytes)
        return self._file.read(num_bytes)

    def require(self, num_bytes: int) -> None:
        """Refuses a length that the file can't hold, before anything is allocated for it."""
        here = self._file.tell()
        if num_bytes > self.file_bytes - here:
            raise CheckpointError(
                f"{self.path} is truncated or damaged: {num_bytes} bytes expected at offset "
                f"{here}, the file has {self.file_bytes} bytes in all"
            )

    def uint32(self) -> int:
        return int.from_bytes(self.take(4), "little")

    def uint64(self) -> int:
        return int.from_bytes(self.take(8), "little")

    def string(self) -> str:
        text = self.take(self.uint64())
        try:
            return text.decode()
        except UnicodeDecodeError as error:
            raise CheckpointError(
                f"{self.path} is damaged: it has a string that isn't UTF-8, {text[:40]!r}"
            ) from error

    def value(self, key: str) -> Any:
        kind = self._value_type(key)
        if kind == GGUFValueType.STRING:
            return self.string()
        if kind == GGUFValueType.ARRAY:
            return self._array(key)
        return self._scalars(kind, 1)[0]

    def _array(self, key: str) -> list[Any]:
        kind = self._value_type(key)
        length = self.uint64()
        if kind == GGUFValueType.STRING:
            self.require(length * 8)
            return [self.string() for _ in range(length)]
        if kind == GGUFValueType.ARRAY:
            raise CheckpointError(f"{self.path}: metadata {key!r} is an array of arrays")
        return self._scalars(kind, length)

    def _scalars(self, kind: GGUFValueType, count: int) -> list[Any]:
        dtype = np.dtype(_SCALARS[kind])
        values: list[Any] = np.frombuffer(self.take(count * dtype.itemsize), dtype).tolist()
        return values

    def _value_type(self, key: str) -> GGUFValueType:
        number = self.uint32()
        try:
            return GGUFValueType(number)
        except ValueError:
            raise CheckpointError(
                f"{self.path} is damaged: metadata {key!r} has the unknown type {number}"
            ) from None


def _read_preamble(cursor: _Cursor) -> tuple[int, int]:
    """Tensor count and metadata count."""
    magic = cursor.take(4)
    if magic != MAGIC:
        raise CheckpointError(f"{cursor.path} isn't a GGUF file: it starts with {magic!r}")
    version = cursor.uint32()
    if version & 0xFFFF == 0:
        raise CheckpointError(
            f"{cursor.path} is a big-endian GGUF file; only little-endian ones are supported"
        )
    if version not in _VERSIONS:
        raise CheckpointError(
            f"{cursor.path} is GGUF version {version}; versions 2 and 3 are supported, so convert "
            "the model again"
        )
    return cursor.uint64(), cursor.uint64()


def _read_metadata(cursor: _Cursor, num_entries: int) -> dict[str, Any]:
    cursor.require(num_entries * 13)  # the smallest entry: empty key, type, one byte
    metadata: dict[str, Any] = {}
    for _ in range(num_entries):
        key = cursor.string()
        if key in metadata:
            raise CheckpointError(f"{cursor.path}: metadata {key!r} is repeated")
        metadata[key] = cursor.value(key)
    return metadata


_Entry = tuple[tuple[int, ...], int, int]  # dimensions, type number, offset in the data


def _read_directory(cursor: _Cursor, num_tensors: int) -> dict[str, _Entry]:
    cursor.require(num_tensors * 24)  # the smallest entry: empty name, no dimensions
    directory: dict[str, _Entry] = {}
    for _ in range(num_tensors):
        name = cursor.string()
        if name in directory:
            raise CheckpointError(f"{cursor.path}: tensor {name!r} is repeated")
        num_dimensions = cursor.uint32()
        if num_dimensions > _MAX_DIMENSIONS:
            raise CheckpointError(
                f"{cursor.path} is damaged: tensor {name!r} has {num_dimensions} dimensions, "
                f"GGUF allows {_MAX_DIMENSIONS}"
            )
        dimensions = struct.unpack(f"<{num_dimensions}Q", cursor.take(8 * num_dimensions))
        directory[name] = (dimensions, cursor.uint32(), cursor.uint64())
    return directory


def _place_tensor(
    path: Path, name: str, entry: _Entry, data_start: int, alignment: int
) -> GgufTensor:
    dimensions, number, offset = entry
    kind = _TENSOR_TYPES.get(number)
    if kind is None or kind.name not in READABLE_TYPES:
        raise CheckpointError(
            f"{path}: tensor {name!r} is stored as {kind.name if kind else f'type {number}'}; "
            f"supported types are {', '.join(READABLE_TYPES)}"
        )
    block_size, block_bytes = GGML_QUANT_SIZES[kind]
    row_size = dimensions[0] if dimensions else 1
    if row_size % block_size:
        raise CheckpointError(
            f"{path} is damaged: tensor {name!r} has rows of {row_size} elements, not whole "
            f"{kind.name} blocks of {block_size}"
        )
    if offset % alignment:
        raise CheckpointError(
            f"{path} is damaged: tensor {name!r} is at data offset {offset}, which isn't a "
            f"multiple of the alignment {alignment}"
        )
    num_bytes = math.prod(dimensions) // block_size * block_bytes
    return GgufTensor(tuple(reversed(dimensions)), kind, data_start + offset, num_bytes)


def _check_ranges(path: Path, tensors: Mapping[str, GgufTensor], file_bytes: int) -> None:
    """Every tensor lies in the file, and none over another."""
    position = 0
    for name, tensor in sorted(tensors.items(), key=lambda item: item[1].offset):
        if tensor.offset < position:
            raise CheckpointError(f"{path} is damaged: tensor {name!r} overlaps another tensor")
        position = tensor.offset + tensor.num_bytes
        if position > file_bytes:
            raise CheckpointError(
                f"{path} is truncated: tensor {name!r} ends at byte {position}, "
                f"the file has {file_bytes}"
            )


def _alignment(path: Path, metadata: Mapping[str, Any]) -> int:
    alignment = metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
    if type(alignment) is not int or alignment < 1 or alignment & (alignment - 1):
        raise CheckpointError(
            f"{path}: general.alignment is {alignment!r}, but must be a power of two"
        )
    return alignment


def _refuse_split(path: Path, metadata: Mapping[str, Any]) -> None:
    count = metadata.get("split.count", 1)
    if type(count) is not int or count > 1:
        raise CheckpointError(
            f"{path} is one part of a model split into {count} GGUF files, which is not yet "
            "supported; merge the parts into one file (llama-gguf-split --merge)"
        )


def is_gguf(path: Path) -> bool:
    """Whether the file is named or starts like GGUF. Raises CheckpointError if there is none."""
    try:
        with path.open("rb") as file:
            return file.read(len(MAGIC)) == MAGIC or path.suffix == ".gguf"
    except FileNotFoundError:
        raise CheckpointError(f"{path} doesn't exist") from None
    except OSError as error:
        raise CheckpointError(f"{path} can't be read: {error.strerror}") from error
