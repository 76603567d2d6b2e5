"""GGUF files as checkpoints; quantised tensors are dequantised as they are read."""

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from gguf.constants import GGML_QUANT_SIZES
from gguf.quants import dequantize
from numpy.typing import NDArray

from llmbuild.builder.checkpoint.base import TensorInfo
from llmbuild.builder.checkpoint.files import read_bytes
from llmbuild.builder.checkpoint.gguf_config import gguf_config
from llmbuild.builder.checkpoint.gguf_file import GgufTensor, read_gguf
from llmbuild.builder.checkpoint.gguf_rope import ROPE_TENSORS
from llmbuild.errors import CheckpointError
from llmbuild.quant.grid import QuantisedMatrix, WeightGrid

_PLAIN_DTYPES: Mapping[str, np.dtype[Any]] = {
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}
_GRIDS: Mapping[str, WeightGrid] = {
    "Q4_0": WeightGrid(bits=4, group_size=32, symmetric=True),
    "Q4_1": WeightGrid(bits=4, group_size=32, symmetric=False),
    "Q8_0": WeightGrid(bits=8, group_size=32, symmetric=True),
}
_ELEMENTS_PER_READ = 1 << 18  # 1 MB as float32; dequantising takes a few times as much


class GgufCheckpoint:
    """A GGUF model. Of its metadata only the translated config is kept.

    The rotary divisors that are stored as tensors (ROPE_TENSORS) become part of the config and
    aren't among `tensors`. Raises CheckpointError as read_gguf and gguf_config do.
    """

    format = "gguf"
    notes: tuple[str, ...] = ()

    def __init__(self, path: Path) -> None:
        file = read_gguf(path)
        self._path = path
        self._stored = file.tensors
        rope_factors = self._read_rope_factors()
        self.tensors: Mapping[str, TensorInfo] = {
            name: TensorInfo(tensor.shape, tensor.type.name, _grid(tensor))
            for name, tensor in file.tensors.items()
            if name not in ROPE_TENSORS
        }
        try:
            self.config: dict[str, Any] = gguf_config(file.metadata, self.tensors, rope_factors)
        except CheckpointError as error:
            raise CheckpointError(f"{path}: {error}") from error

    def read(self, name: str) -> NDArray[Any]:
        return _read(self._path, self._stored[name])

    def read_rows(self, name: str, begin: int, end: int) -> NDArray[Any]:
        tensor = self._stored[name]
        if len(tensor.shape) == 1:  # its blocks, where it has such, are of several items
            return self.read(name)[begin:end].copy()
        return _read(self._path, tensor.rows(begin, end))

    def read_codes(self, name: str, rows: tuple[int, int] | None = None) -> QuantisedMatrix:
        tensor, grid = self._stored[name], self.tensors[name].grid
        assert grid is not None
        return _read_codes(self._path, tensor.rows(*rows) if rows else tensor, grid)

    def _read_rope_factors(self) -> dict[str, list[float]]:
        return {
            name: self.read(name).astype(np.float32).ravel().tolist()
            for name in ROPE_TENSORS
            if name in self._stored
        }


def _read(path: Path, tensor: GgufTensor) -> NDArray[Any]:
    plain = _PLAIN_DTYPES.get(tensor.type.name)
    if plain is None:
        return _read_quantised(path, tensor)
    return read_bytes(path, tensor.offset, tensor.num_bytes).view(plain).reshape(tensor.shape)


def _read_quantised(path: Path, tensor: GgufTensor) -> NDArray[np.float32]:
    """Dequantises a few blocks at a time: beside the result, memory stays small."""
    block_size, block_bytes = GGML_QUANT_SIZES[tensor.type]
    result = np.empty(tensor.num_bytes // block_bytes * block_size, np.float32)
    step_bytes = _ELEMENTS_PER_READ // block_size * block_bytes
    for start in range(0, tensor.num_bytes, step_bytes):
        num_bytes = min(step_bytes, tensor.num_bytes - start)
        first = start // block_bytes * block_size
        last = first + num_bytes // block_bytes * block_size
        packed = read_bytes(path, tensor.offset + start, num_bytes)
        result[first:last] = dequantize(packed, tensor.type)
    return result.reshape(tensor.shape)


def _grid(tensor: GgufTensor) -> WeightGrid | None:
    return _GRIDS.get(tensor.type.name) if len(tensor.shape) > 1 else None


def _read_codes(path: Path, tensor: GgufTensor, grid: WeightGrid) -> QuantisedMatrix:
    """The stored blocks taken apart, a few rows at a time. A block is its float16 scale, its
    minimum unless the grid is symmetric, and its codes: int8, or 4 bits each with those of the
    block's second half in the upper ones."""
    *stack, columns = tensor.shape
    tensor = replace(tensor, shape=(math.prod(stack), columns))
    rows, width = tensor.shape[0], grid.columns_of(columns)
    groups = columns // width
    codes = np.empty((rows, columns), np.uint8)
    numbers = np.empty((1 if grid.symmetric else 2, rows, groups), np.float16)
    step = max(1, _ELEMENTS_PER_READ // columns)
    for row in range(0, rows, step):
        part = slice(row, min(row + step, rows))
        stored_rows = tensor.rows(part.start, part.stop)
        count = stored_rows.shape[0]
        packed = read_bytes(path, stored_rows.offset, stored_rows.num_bytes)
        blocks = packed.reshape(count, groups, -1)
        head = 2 * len(numbers)
        numbers[:, part] = np.moveaxis(blocks[..., :head].copy().view(np.float16), -1, 0)
        stored = blocks[..., head:]
        if grid.bits == 4:
            halves = np.concatenate([stored & 15, stored >> 4], axis=-1)
        else:
            halves = stored ^ 0x80  # int8 to codes around 128
        codes[part] = halves.reshape(count, columns)
    codes, numbers = codes.reshape(*stack, columns), numbers.reshape(len(numbers), *stack, groups)
    return QuantisedMatrix(grid, codes, numbers[0], None if grid.symmetric else numbers[1])
