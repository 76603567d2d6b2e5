"""Steps for plans over paged KV pools, and where those pools lie.

Shapes are few: TensorRT prepares a plan anew for each that it hasn't just run, and a CUDA graph is
of one. A decode step is padded to the next bucket; another has a power of two of tokens, and room
for as many sequences as a step may have. Padding is tokens that no sequence has, and sequences
without tokens, which plans leave out; no block is written for it.
"""

from collections.abc import Sequence

import numpy as np

from llmbuild.runtime.batch import StepBatch
from llmbuild.runtime.executors.execution import Execution, Int32Array
from llmbuild.runtime.manifest import KVLayout
from llmbuild.runtime.target import ALIGNMENT_BYTES


class PagedSteps:
    """The executions of each step. tokens, sequences: of a step, at most. blocks: of a sequence, at
    most. buckets: sequences of a decode execution, ascending."""

    def __init__(self, tokens: int, sequences: int, blocks: int, buckets: Sequence[int]) -> None:
        self._tokens, self._sequences, self._blocks = tokens, sequences, blocks
        self._buckets = sorted({*buckets, sequences})

    @property
    def most_numbers(self) -> dict[str, int]:
        """Of each input of the largest execution."""
        return {
            "token_ids": max(self._tokens, self._sequences),
            "positions": max(self._tokens, self._sequences),
            "query_start": self._sequences + 1,
            "kv_lengths": self._sequences,
            "block_tables": self._sequences * self._blocks,
            "logit_rows": self._sequences,
        }

    def executions(self, batch: StepBatch) -> list[Execution]:
        """One, but where more rows of logits are wanted than a plan gives: each writes the same
        into the KV cache, and gives some of the rows."""
        tokens, sequences = self._shape(batch)
        tables = np.zeros((sequences, self._blocks), np.int32)
        tables[: batch.num_sequences, : batch.blocks_per_sequence] = batch.block_tables
        more = (0, sequences - batch.num_sequences)
        inputs = {
            "token_ids": _filled_up(batch.token_ids, tokens),
            "positions": _filled_up(batch.positions, tokens),
            "query_start": np.pad(batch.query_start, more, mode="edge"),
            "kv_lengths": _filled_up(batch.kv_lengths, sequences),
            "block_tables": tables,
        }
        made = []
        for first in range(0, max(1, batch.num_logit_rows), sequences):
            wanted = batch.logit_rows[first : first + sequences]
            results = np.arange(first, first + len(wanted), dtype=np.int32)
            rows = {"logit_rows": _filled_up(wanted, sequences)}
            made.append(Execution(batch.is_decode, inputs | rows, results))
        return made

    def _shape(self, batch: StepBatch) -> tuple[int, int]:
        """Tokens and sequences, padding included."""
        if batch.is_decode:
            size = next(size for size in self._buckets if size >= batch.num_sequences)
            return size, size
        tokens = 1 << (batch.num_tokens - 1).bit_length()
        return min(tokens, self._tokens), self._sequences


def pool_offsets(kv: KVLayout, num_blocks: int) -> tuple[dict[str, int], int]:
    """Where each pool begins in a memory that has all of them, by the plan's input that is given
    its address; and that memory's bytes."""
    offsets, end = {}, 0
    for name, block_bytes in kv.pool_bytes.items():
        offsets[name] = end
        end += -(-num_blocks * block_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
    return offsets, end


def _filled_up(numbers: Int32Array, size: int) -> Int32Array:
    """With zeros."""
    return np.pad(numbers, (0, size - len(numbers)))
