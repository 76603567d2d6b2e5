"""The memory of a plan on the GPU: its KV cache, inputs, and logits."""

import ctypes
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from llmbuild.runtime.executors.cuda import Cuda
from llmbuild.runtime.executors.execution import Execution, Int32Array
from llmbuild.runtime.executors.plan import CONTEXT, DECODE
from llmbuild.runtime.manifest import Rank
from llmbuild.runtime.target import ALIGNMENT_BYTES

LOGITS, LOGIT_ROWS = "logits", "logit_rows"

E = TypeVar("E", bound=Execution)


@dataclass(frozen=True)
class Placed:
    """An execution whose inputs lie in pinned memory, ready to be copied and run: what a context is
    bound to, and how much is copied before and after."""

    profile: int
    shapes: dict[str, tuple[int, ...]]
    addresses: dict[str, int]
    input_bytes: int
    num_rows: int  # of logits


class PlanMemory(ABC, Generic[E]):
    """All that a plan's executions read and write. Inputs are small and change with every
    execution: they lie together, and go to the GPU in one copy.

    kv_bytes: of the KV cache, which `kv_purpose` says what for. input_bytes: of the largest
    execution's inputs, each padded. num_tokens: of the vocabulary, those that the rank has.
    max_rows: of logits.
    """

    def __init__(
        self,
        cuda: Cuda,
        rank: Rank,
        max_rows: int,
        kv_bytes: int,
        kv_purpose: str,
        input_bytes: int,
    ) -> None:
        """Takes nothing yet."""
        self._cuda, self.kv_bytes, self._kv_purpose = cuda, kv_bytes, kv_purpose
        inputs = (each for each in rank.plan_tensors if each.is_input and each.dtype == "int32")
        self._inputs = [each.name for each in inputs]
        self.num_tokens = rank.tokens.count
        self._max_rows = max_rows
        self._input_bytes = input_bytes
        self._logits_bytes = padded(4 * self._max_rows * self.num_tokens)
        self._device: list[int] = []
        self._host: list[int] = []

    def take(self) -> None:
        """Raises EngineError where there isn't enough. The KV cache is zeros when the stream has
        got there."""
        self._cache_base = self._take_device(self.kv_bytes, self._kv_purpose)
        self.clear()
        self._input_base = self._take_device(self._input_bytes, "inputs")
        self._logits = self._take_device(self._logits_bytes, "logits")
        for size in (self._input_bytes, self._logits_bytes):
            self._host.append(self._cuda.allocate_host(size))
        self._staging = view(self._host[0], self._input_bytes)
        rows = view(self._host[1], 4 * self._max_rows * self.num_tokens).view(np.float32)
        self._rows = rows.reshape(self._max_rows, self.num_tokens)

    def clear(self) -> None:
        """Make the KV cache zeros."""
        self._cuda.clear(self._cache_base, self.kv_bytes)

    def recover(self) -> None:
        """After a step that went wrong."""

    @abstractmethod
    def place(self, execution: E) -> Placed:
        """Write an execution's inputs. Nothing that reads those of the last one may run."""

    def _placed(
        self,
        inputs: Mapping[str, Int32Array],
        is_decode: bool,
        cache_shapes: Mapping[str, tuple[int, ...]],
        cache_addresses: Mapping[str, int],
    ) -> Placed:
        num_rows = len(inputs[LOGIT_ROWS])
        assert num_rows <= self._max_rows, f"{num_rows} rows of logits of one execution"
        shapes = dict(cache_shapes)
        addresses = {LOGITS: self._logits, **cache_addresses}
        offset = 0
        for name in self._inputs:
            values = inputs[name]
            self._staging[offset : offset + values.nbytes] = values.ravel().view(np.uint8)
            shapes[name] = values.shape
            addresses[name] = self._input_base + offset
            offset += padded(values.nbytes)
        return Placed(DECODE if is_decode else CONTEXT, shapes, addresses, offset, num_rows)

    def copy_in(self, placed: Placed) -> None:
        self._cuda.copy_to_device(self._input_base, self._host[0], placed.input_bytes)

    def copy_out(self, placed: Placed) -> None:
        size = 4 * placed.num_rows * self.num_tokens
        self._cuda.copy_to_host(self._host[1], self._logits, size)

    def logits(self, placed: Placed) -> NDArray[np.float32]:
        """[rows, tokens], of the execution that has ended; as it stands until the next."""
        return self._rows[: placed.num_rows]

    def close(self) -> None:
        """Give it back. The GPU has ended its work."""
        while self._device:
            self._cuda.free(self._device.pop())
        while self._host:
            self._cuda.free_host(self._host.pop())

    def _take_device(self, size: int, purpose: str) -> int:
        self._device.append(self._cuda.allocate(size, purpose))
        return self._device[-1]


def padded(size: int) -> int:
    return -(-size // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def view(address: int, size: int) -> NDArray[np.uint8]:
    """The host's memory there."""
    return np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(address))
