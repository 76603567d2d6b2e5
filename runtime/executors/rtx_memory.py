"""The memory of a plan on the GPU: KV caches, inputs, and logits."""

import ctypes
from dataclasses import dataclass
from math import prod

import numpy as np
from numpy.typing import NDArray

from llmbuild.errors import EngineError
from llmbuild.runtime.executors.cuda import Cuda
from llmbuild.runtime.executors.linear_kv import SlotExecution
from llmbuild.runtime.executors.rtx_plan import CONTEXT, DECODE
from llmbuild.runtime.manifest import Manifest
from llmbuild.runtime.target import ALIGNMENT_BYTES, PlanTensor

LOGITS, LOGIT_ROWS = "logits", "logit_rows"
UPDATED = ".updated"  # ends the output's name that is a cache after the execution
_ITEM_BYTES = {"int32": 4, "fp32": 4, "fp16": 2, "bf16": 2}


@dataclass(frozen=True)
class Placed:
    """An execution whose inputs lie in pinned memory, ready to be copied and run: what a context is
    bound to, and how much is copied before and after."""

    profile: int
    shapes: dict[str, tuple[int, ...]]
    addresses: dict[str, int]
    input_bytes: int
    num_rows: int  # of logits


class PlanMemory:
    """All that a plan's executions read and write.

    A cache has a slot for each sequence, one after the other, and an execution on neighbouring
    slots is given the first one's address. Inputs are small and change with every execution: they
    lie together, and go to the GPU in one copy.
    """

    def __init__(self, cuda: Cuda, manifest: Manifest, num_slots: int) -> None:
        """Takes nothing yet. Raises EngineError for a plan that can't be given such memory."""
        tensors = manifest.ranks[0].plan_tensors
        self._cuda, self._num_slots = cuda, num_slots
        self._inputs = [each for each in tensors if each.is_input and each.dtype == "int32"]
        self._caches = [each for each in tensors if each.is_input and each.dtype != "int32"]
        self.capacity = _size(self._caches[0], 2)
        self._slot_bytes = {cache.name: _slot_bytes(cache) for cache in self._caches}
        self.vocab_size = manifest.vocab_size
        limits = manifest.limits
        self._max_rows = limits.max_sequences
        most = max(limits.max_step_tokens, limits.max_sequences)
        self._input_bytes = len(self._inputs) * _padded(4 * most)
        self._logits_bytes = _padded(4 * self._max_rows * self.vocab_size)
        self.kv_bytes = num_slots * sum(self._slot_bytes.values())
        self._device: list[int] = []
        self._host: list[int] = []

    def take(self) -> None:
        """Raises EngineError where there isn't enough. Caches are zeros when the stream has got
        there: what isn't written yet is multiplied by 0, and must be a number."""
        purpose = f"the KV cache of {self._num_slots} sequences of {self.capacity} tokens"
        self._cache_base = self._take_device(self.kv_bytes, purpose)
        self.clear()
        self._input_base = self._take_device(self._input_bytes, "inputs")
        self._logits = self._take_device(self._logits_bytes, "logits")
        for size in (self._input_bytes, self._logits_bytes):
            self._host.append(self._cuda.allocate_host(size))
        self._staging = _view(self._host[0], self._input_bytes)
        rows = _view(self._host[1], 4 * self._max_rows * self.vocab_size).view(np.float32)
        self._rows = rows.reshape(self._max_rows, self.vocab_size)

    def clear(self) -> None:
        """Make the caches zeros, at first and after a step that went wrong: a NaN in a slot would
        meet the next sequence's tokens, as what is masked is multiplied by 0."""
        self._cuda.clear(self._cache_base, self.kv_bytes)

    def place(self, execution: SlotExecution) -> Placed:
        """Write an execution's inputs. Nothing that reads those of the last one may run."""
        inputs, first = execution.inputs, execution.first_slot
        if execution.is_decode:  # always as many rows: a graph's shapes are those of its bucket
            rows = np.zeros(execution.num_slots, np.int32)
            rows[: len(inputs[LOGIT_ROWS])] = inputs[LOGIT_ROWS]
            inputs = inputs | {LOGIT_ROWS: rows}
        num_rows = len(inputs[LOGIT_ROWS])
        assert num_rows <= self._max_rows, f"{num_rows} rows of logits of one prompt"
        shapes: dict[str, tuple[int, ...]] = {}
        addresses = {LOGITS: self._logits}
        offset = 0
        for tensor in self._inputs:
            values = inputs[tensor.name]
            self._staging[offset : offset + values.nbytes] = values.ravel().view(np.uint8)
            shapes[tensor.name] = values.shape
            addresses[tensor.name] = self._input_base + offset
            offset += _padded(values.nbytes)
        base = self._cache_base
        for cache in self._caches:
            address = base + first * self._slot_bytes[cache.name]
            base += self._num_slots * self._slot_bytes[cache.name]
            addresses |= {cache.name: address, cache.name + UPDATED: address}
            shapes[cache.name] = (execution.num_slots, *(_size(cache, axis) for axis in (1, 2, 3)))
        profile = DECODE if execution.is_decode else CONTEXT
        return Placed(profile, shapes, addresses, offset, num_rows)

    def copy_in(self, placed: Placed) -> None:
        self._cuda.copy_to_device(self._input_base, self._host[0], placed.input_bytes)

    def copy_out(self, placed: Placed) -> None:
        size = 4 * placed.num_rows * self.vocab_size
        self._cuda.copy_to_host(self._host[1], self._logits, size)

    def logits(self, placed: Placed) -> NDArray[np.float32]:
        """[rows, vocab], of the execution that has ended; as it stands until the next."""
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


def _slot_bytes(cache: PlanTensor) -> int:
    """Of one sequence. Raises EngineError where a slot's address can't be given to TensorRT."""
    size = prod(_size(cache, axis) for axis in (1, 2, 3)) * _ITEM_BYTES[cache.dtype]
    if size % ALIGNMENT_BYTES:
        raise EngineError(
            f"a sequence has {size} bytes of {cache.name}, which must be a multiple of "
            f"{ALIGNMENT_BYTES}; compile with a limits.max_sequence_length that is one of 8"
        )
    return size


def _size(tensor: PlanTensor, axis: int) -> int:
    size = tensor.shape[axis]
    assert isinstance(size, int), f"{tensor.name} {tensor.describe()}"
    return size


def _padded(size: int) -> int:
    return -(-size // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def _view(address: int, size: int) -> NDArray[np.uint8]:
    return np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(address))
