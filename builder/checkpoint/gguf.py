"""GGUF files as checkpoints; quantised tensors are dequantised as they are read."""

from collections.abc import Mapping
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

_PLAIN_DTYPES: Mapping[str, np.dtype[Any]] = {
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}
_ELEMENTS_PER_READ = 1 << 18  # 1 MB as float32; dequantising takes a few times as much


class GgufCheckpoint:
    """A GGUF model. Of its metadata only the translated config is kept.

    The rotary divisors that are stored as tensors (ROPE_TENSORS) become part of the config and
    aren't among `tensors`. Raises CheckpointError as read_gguf and gguf_config do.
    """

    format = "gguf"

    def __init__(self, path: Path) -> None:
        file = read_gguf(path)
        self._path = path
        self._stored = file.tensors
        rope_factors = self._read_rope_factors()
        self.tensors: Mapping[str, TensorInfo] = {
            name: TensorInfo(tensor.shape, tensor.type.name)
            for name, tensor in file.tensors.items()
            if name not in ROPE_TENSORS
        }
        try:
            self.config: dict[str, Any] = gguf_config(file.metadata, self.tensors, rope_factors)
        except CheckpointError as error:
            raise CheckpointError(f"{path}: {error}") from error

    def read(self, name: str) -> NDArray[Any]:
        tensor = self._stored[name]
        plain = _PLAIN_DTYPES.get(tensor.type.name)
        if plain is None:
            return _read_quantised(self._path, tensor)
        data = read_bytes(self._path, tensor.offset, tensor.num_bytes)
        return data.view(plain).reshape(tensor.shape)

    def _read_rope_factors(self) -> dict[str, list[float]]:
        return {
            name: self.read(name).astype(np.float32).ravel().tolist()
            for name in ROPE_TENSORS
            if name in self._stored
        }


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
