"""Hugging Face directories: config.json beside one or several safetensors files.

File layout (the safetensors format): a little-endian uint64 N, N bytes of JSON that give every
tensor's dtype, shape and byte range, then the data, with neither gaps nor overlaps.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from llmbuild.builder.checkpoint.base import TensorInfo
from llmbuild.builder.checkpoint.files import parse_json_object, read_bytes, read_json_object
from llmbuild.errors import CheckpointError

SINGLE_NAME = "model.safetensors"
INDEX_NAME = "model.safetensors.index.json"

READABLE_DTYPES: dict[str, np.dtype[Any]] = {
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}
_INTEGER_DTYPES: dict[str, np.dtype[Any]] = {
    "I8": np.dtype(np.int8),
    "I32": np.dtype(np.int32),
    "I64": np.dtype(np.int64),
}

_DTYPE_BITS: Mapping[str, int] = {
    "F4": 4,
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
    **dict.fromkeys(("BOOL", "U8", "I8"), 8),
    **dict.fromkeys(("F8_E4M3", "F8_E5M2", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 16),
    **dict.fromkeys(("U32", "I32", "F32"), 32),
    **dict.fromkeys(("U64", "I64", "F64", "C64"), 64),
}

_PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
_MAX_HEADER_BYTES = 100_000_000  # the format's own limit


@dataclass(frozen=True)
class _Location:
    path: Path
    offset: int
    num_bytes: int


class SafetensorsCheckpoint:
    """A Hugging Face model directory, single or sharded. Opening reads headers alone.

    Raises CheckpointError for anything malformed: missing or invalid config.json, a header that
    contradicts its file, shards that contradict the index, weights that exist only as pickles.
    """

    format = "safetensors"
    notes: tuple[str, ...] = ()

    def __init__(self, directory: Path) -> None:
        weight_map = _read_weight_map(directory)
        files = sorted(set(weight_map.values())) or [_single_file(directory)]
        self.config: dict[str, Any] = read_json_object(directory / "config.json")
        self._locations: dict[str, _Location] = {}
        tensors: dict[str, TensorInfo] = {}
        for file in files:
            for name, (info, location) in _read_header(directory / file).items():
                if name in tensors:
                    other = self._locations[name].path.name
                    raise CheckpointError(
                        f"{directory}: tensor {name!r} is in two files, {other} and {file}"
                    )
                tensors[name] = info
                self._locations[name] = location
        _check_index(directory, weight_map, self._locations)
        self.tensors: Mapping[str, TensorInfo] = tensors

    def read(self, name: str) -> NDArray[Any]:
        self._require_readable(name)
        return self.read_stored(name)

    def read_rows(self, name: str, begin: int, end: int) -> NDArray[Any]:
        self._require_readable(name)
        info, location = self.tensors[name], self._locations[name]
        assert 0 <= begin <= end <= info.shape[0]
        dtype, row_shape = READABLE_DTYPES[info.dtype], info.shape[1:]
        row_bytes = math.prod(row_shape) * dtype.itemsize
        offset = location.offset + begin * row_bytes
        data = read_bytes(location.path, offset, (end - begin) * row_bytes)
        return data.view(dtype).reshape(end - begin, *row_shape)

    def read_stored(self, name: str) -> NDArray[Any]:
        """A tensor of a readable type, or of signed integers of 8, 32 or 64 bits, as it is."""
        info, location = self.tensors[name], self._locations[name]
        dtype = (READABLE_DTYPES | _INTEGER_DTYPES)[info.dtype]
        data = read_bytes(location.path, location.offset, location.num_bytes)
        return data.view(dtype).reshape(info.shape)

    def _require_readable(self, name: str) -> None:
        dtype = self.tensors[name].dtype
        if dtype not in READABLE_DTYPES:
            raise CheckpointError(
                f"{self._locations[name].path}: tensor {name!r} is stored as {dtype}; "
                f"weights can be read as {', '.join(READABLE_DTYPES)}"
            )


def refuse_pickle(path: Path) -> None:
    """Raises CheckpointError when the file's name says that it's a pickle."""
    if path.suffix in _PICKLE_SUFFIXES:
        raise CheckpointError(
            f"{path} is a pickle, and pickles are never loaded because they can run any code; "
            "convert the model to safetensors (save_pretrained of transformers writes it)"
        )


def _single_file(directory: Path) -> str:
    """The name of an unsharded model's file, or the reason why there is none."""
    if (directory / SINGLE_NAME).exists():
        return SINGLE_NAME
    if (directory / "adapter_config.json").exists():
        raise CheckpointError(
            f"{directory} holds an adapter (adapter_config.json), not a model; merge it into its "
            "base model first (merge_and_unload of peft) and give the merged directory"
        )
    entries = sorted(directory.iterdir())
    for entry in entries:
        refuse_pickle(entry)
    found = ", ".join(entry.name for entry in entries) or "nothing"
    raise CheckpointError(
        f"{directory} holds neither {SINGLE_NAME} nor {INDEX_NAME}; it holds {found}"
    )


def _read_weight_map(directory: Path) -> dict[str, str]:
    """Tensor name -> name of the shard, a file in the directory; empty if it isn't sharded."""
    index = directory / INDEX_NAME
    if not index.exists():
        return {}
    if (directory / SINGLE_NAME).exists():
        raise CheckpointError(
            f"{directory} holds both {SINGLE_NAME} and {INDEX_NAME}, which may be two models; "
            "remove the one that isn't meant"
        )
    weight_map = read_json_object(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{index} must have weight_map, tensor name to file name")
    for name, shard in weight_map.items():
        is_name = isinstance(shard, str) and shard.isprintable() and Path(shard).name == shard
        if not is_name or shard in ("", ".."):
            raise CheckpointError(f"{index}: tensor {name!r} has {shard!r}, not a plain file name")
    return weight_map


def _check_index(
    directory: Path, weight_map: Mapping[str, str], locations: Mapping[str, _Location]
) -> None:
    """Every tensor of the index is in the shard that the index says. (A tensor that the index
    doesn't list stays: whoever maps the names reports it as left over.)"""
    missing = sorted(
        f"{name} ({shard})"
        for name, shard in weight_map.items()
        if name not in locations or locations[name].path.name != shard
    )
    if missing:
        raise CheckpointError(
            f"{directory}: tensors that the index lists aren't in their files: {', '.join(missing)}"
        )


def _read_header(path: Path) -> dict[str, tuple[TensorInfo, _Location]]:
    try:
        file_bytes = path.stat().st_size
    except OSError as error:
        raise CheckpointError(f"{path} can't be read: {error.strerror}") from error
    if file_bytes < 8:
        raise CheckpointError(f"{path} is truncated: {file_bytes} bytes hold no safetensors header")
    header_bytes = int.from_bytes(read_bytes(path, 0, 8).tobytes(), "little")
    if header_bytes > min(_MAX_HEADER_BYTES, file_bytes - 8):
        raise CheckpointError(
            f"{path} isn't a whole safetensors file: it states a header of {header_bytes} bytes "
            f"and has {file_bytes - 8} bytes after the length"
        )
    header = parse_json_object(read_bytes(path, 8, header_bytes).tobytes(), f"header of {path}")
    header.pop("__metadata__", None)
    data_start = 8 + header_bytes
    entries = {name: _parse_entry(path, name, entry) for name, entry in header.items()}
    _check_ranges(path, {name: span for name, (_, span) in entries.items()}, file_bytes, data_start)
    return {
        name: (info, _Location(path, data_start + begin, end - begin))
        for name, (info, (begin, end)) in entries.items()
    }


def _parse_entry(path: Path, name: str, entry: object) -> tuple[TensorInfo, tuple[int, int]]:
    """The tensor's info and its byte range in the data, the size checked against the shape."""
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise CheckpointError(
            f"{path}: tensor {name!r} must have dtype, shape and data_offsets, but has {entry!r}"
        )
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in _DTYPE_BITS:
        raise CheckpointError(f"{path}: tensor {name!r} has dtype {dtype!r}, unknown to the format")
    if not _are_sizes(shape) or not _are_sizes(offsets) or len(offsets) != 2:
        raise CheckpointError(
            f"{path}: tensor {name!r} has shape {shape!r} and data_offsets {offsets!r}; "
            "both must be lists of non-negative integers"
        )
    begin, end = offsets
    if (end - begin) * 8 != math.prod(shape) * _DTYPE_BITS[dtype]:
        raise CheckpointError(
            f"{path}: tensor {name!r} takes {end - begin} bytes, but {dtype} of shape {shape} "
            f"takes {math.prod(shape) * _DTYPE_BITS[dtype] // 8}"
        )
    return TensorInfo(tuple(shape), dtype), (begin, end)


def _are_sizes(value: object) -> bool:
    return isinstance(value, list) and all(type(item) is int and item >= 0 for item in value)


def _check_ranges(
    path: Path, spans: Mapping[str, tuple[int, int]], file_bytes: int, data_start: int
) -> None:
    """The byte ranges tile the data exactly."""
    position = 0
    for name, (begin, end) in sorted(spans.items(), key=lambda item: item[1]):
        if begin != position:
            fault = "overlaps the tensor before it" if begin < position else "follows a gap"
            raise CheckpointError(f"{path}: tensor {name!r} at data offset {begin} {fault}")
        position = end
    if data_start + position != file_bytes:
        fault = "is truncated" if data_start + position > file_bytes else "has bytes left over"
        raise CheckpointError(
            f"{path} {fault}: its header describes {data_start + position} bytes, "
            f"the file has {file_bytes}"
        )
