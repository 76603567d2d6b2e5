"""The memory of a plan with linear KV caches."""

from math import prod

import numpy as np

from llmbuild.errors import EngineError
from llmbuild.runtime.executors.cuda import Cuda
from llmbuild.runtime.executors.linear_kv import SlotExecution
from llmbuild.runtime.executors.plan_memory import LOGIT_ROWS, Placed, PlanMemory, padded
from llmbuild.runtime.manifest import Limits, Rank
from llmbuild.runtime.target import ALIGNMENT_BYTES, PlanTensor

UPDATED = ".updated"  # ends the output's name that is a cache after the execution
_ITEM_BYTES = {"fp16": 2, "bf16": 2}


class SlotMemory(PlanMemory[SlotExecution]):
    """A cache has a slot for each sequence, one after the other, and an execution on neighbouring
    slots is given the first one's address."""

    def __init__(self, cuda: Cuda, limits: Limits, rank: Rank, num_slots: int) -> None:
        """Takes nothing yet. Raises EngineError for a plan that can't be given such memory."""
        tensors = rank.plan_tensors
        self._num_slots = num_slots
        self._caches = [each for each in tensors if each.is_input and each.dtype != "int32"]
        self.capacity = _size(self._caches[0], 2)
        self._slot_bytes = {cache.name: _slot_bytes(cache) for cache in self._caches}
        most = max(limits.max_step_tokens, limits.max_sequences)
        num_inputs = sum(each.is_input for each in tensors) - len(self._caches)
        super().__init__(
            *(cuda, rank, limits.max_sequences, num_slots * sum(self._slot_bytes.values())),
            f"the KV cache of {num_slots} sequences of {self.capacity} tokens",
            num_inputs * padded(4 * most),
        )

    def recover(self) -> None:
        """A NaN in a slot would meet the next sequence's tokens, as what is masked, or isn't
        written yet, is multiplied by 0."""
        self.clear()

    def place(self, execution: SlotExecution) -> Placed:
        inputs, first = execution.inputs, execution.first_slot
        if execution.is_decode:  # always as many rows: a graph's shapes are those of its bucket
            rows = np.zeros(execution.num_slots, np.int32)
            rows[: len(inputs[LOGIT_ROWS])] = inputs[LOGIT_ROWS]
            inputs = inputs | {LOGIT_ROWS: rows}
        shapes: dict[str, tuple[int, ...]] = {}
        addresses: dict[str, int] = {}
        base = self._cache_base
        for cache in self._caches:
            address = base + first * self._slot_bytes[cache.name]
            base += self._num_slots * self._slot_bytes[cache.name]
            addresses |= {cache.name: address, cache.name + UPDATED: address}
            shapes[cache.name] = (execution.num_slots, *(_size(cache, axis) for axis in (1, 2, 3)))
        return self._placed(inputs, execution.is_decode, shapes, addresses)


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
