"""Steps for plans whose KV cache is linear: each sequence has a slot, which holds all its tokens.

A slot is the one block of a sequence's block table. A plan runs on neighbouring slots, with as many
tokens for each, so a step is some executions of plans: one for each sequence that brings several
tokens, and one for all that bring one.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from llmbuild.runtime.batch import StepBatch
from llmbuild.runtime.executors.execution import Execution, Int32Array
from llmbuild.runtime.manifest import SCRATCH_BLOCK


@dataclass(frozen=True)
class SlotExecution(Execution):
    """Of slots [first_slot, first_slot + B), each with L tokens."""

    first_slot: int

    @property
    def num_slots(self) -> int:
        return len(self.inputs["write_indices"])


class LinearSlots:
    """How many tokens each slot holds, and from that the executions of each step.

    num_slots: slots there are. capacity: tokens that one has room for. buckets: numbers of slots
    of a decode execution, ascending; more than the largest are divided. max_rows: logits rows that
    a plan gives; a prompt that wants more is divided.
    """

    def __init__(
        self, num_slots: int, capacity: int, buckets: Sequence[int], max_rows: int
    ) -> None:
        self._held = np.zeros(num_slots, np.int32)
        self._capacity = capacity
        self._max_rows = max_rows
        self._buckets = [size for size in buckets if size <= num_slots] or [1]

    def executions(self, batch: StepBatch) -> list[SlotExecution]:
        """Of one step. They are taken to be done: the slots hold the step's tokens then."""
        slots = batch.block_tables[:, 0] - SCRATCH_BLOCK - 1  # padding's is -1
        counts = np.diff(batch.query_start)
        made = [
            part
            for sequence in np.flatnonzero((counts > 1) & (slots >= 0)).tolist()
            for part in self._prefill(batch, sequence, int(slots[sequence]))
        ]
        is_real = slots >= 0
        self._held[slots[is_real]] = batch.kv_lengths[is_real]
        decoding = np.flatnonzero((counts == 1) & is_real)
        for group in self._groups(decoding[np.argsort(slots[decoding])], slots):
            made.append(self._decode(batch, group, slots))
        return made

    def _prefill(self, batch: StepBatch, sequence: int, slot: int) -> Iterator[SlotExecution]:
        begin, end = batch.query_start[sequence : sequence + 2].tolist()
        rows = np.flatnonzero((batch.logit_rows >= begin) & (batch.logit_rows < end))
        rows = rows[np.argsort(batch.logit_rows[rows], kind="stable")]
        while begin < end:
            own, rows = rows[: self._max_rows], rows[self._max_rows :]
            until = int(batch.logit_rows[rows[0]]) if len(rows) else end
            yield _execution(
                *(slot, batch.token_ids[None, begin:until], batch.positions[None, begin:until]),
                batch.positions[begin : begin + 1],
                batch.logit_rows[own] - begin,
                own,
            )
            begin = until

    def _groups(self, decoding: NDArray[np.intp], slots: Int32Array) -> Iterator[list[int]]:
        """Sequences, ordered by slot, that one execution can have."""
        group: list[int] = []
        for sequence in decoding.tolist():
            if group and slots[sequence] - slots[group[0]] >= self._buckets[-1]:
                yield group
                group = []
            group.append(sequence)
        if group:
            yield group

    def _decode(self, batch: StepBatch, group: list[int], slots: Int32Array) -> SlotExecution:
        """Slots between those of the group, and up to the bucket, are run with a token that is
        written behind what they hold, where the next one that counts will be written. (One that is
        full loses its last token; its sequence has ended.)"""
        own = slots[group]
        span = int(own[-1] - own[0]) + 1
        size = next(size for size in self._buckets if size >= span)
        first = min(int(own[0]), len(self._held) - size)
        tokens = np.zeros(size, np.int32)
        positions = np.minimum(self._held[first : first + size], self._capacity - 1)
        at = own - first
        tokens[at] = batch.token_ids[batch.query_start[group]]
        positions[at] = batch.positions[batch.query_start[group]]
        rows = np.flatnonzero(np.isin(batch.logit_rows, batch.query_start[group]))
        row_of = dict(zip(batch.query_start[group].tolist(), at.tolist(), strict=True))
        wanted = np.array([row_of[int(token)] for token in batch.logit_rows[rows]], np.int32)
        return _execution(first, tokens[:, None], positions[:, None], positions, wanted, rows)


def _execution(
    first_slot: int,
    token_ids: Int32Array,
    positions: Int32Array,
    write_indices: Int32Array,
    logit_rows: Int32Array,
    results: NDArray[np.intp],
) -> SlotExecution:
    length = token_ids.shape[1]
    rows = logit_rows if len(logit_rows) else np.zeros(1, np.int32)
    inputs = {
        "token_ids": token_ids,
        "positions": positions,
        "write_indices": write_indices,
        "kv_lengths": write_indices + length,
        "logit_rows": rows,
    }
    return SlotExecution(
        length == 1,
        {name: np.ascontiguousarray(values, np.int32) for name, values in inputs.items()},
        results.astype(np.int32),
        first_slot,
    )
