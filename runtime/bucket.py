"""Padding of decode steps to the batch sizes that were compiled ahead of time."""

from bisect import bisect_left
from collections.abc import Sequence

import numpy as np

from llmbuild.runtime.batch import Int32Array, StepBatch
from llmbuild.runtime.manifest import SCRATCH_BLOCK


def pad_to_bucket(batch: StepBatch, buckets: Sequence[int]) -> StepBatch:
    """A pure-decode batch padded to the next of `buckets` (ascending); others unchanged.

    Padding is sequences of one token (id 0, position 0) in the scratch block alone, which want
    logits too, so the step stays a pure decode: the caller cuts the rows past its own.
    """
    index = bisect_left(buckets, batch.num_sequences)
    if not batch.is_decode or index == len(buckets):
        return batch
    padding = buckets[index] - batch.num_sequences
    if padding == 0:
        return batch
    size = buckets[index]
    tables = np.full((size, batch.block_tables.shape[1]), SCRATCH_BLOCK, dtype=np.int32)
    tables[: batch.num_sequences] = batch.block_tables
    return StepBatch(
        token_ids=_extended(batch.token_ids, 0, padding),
        positions=_extended(batch.positions, 0, padding),
        query_start=np.arange(size + 1, dtype=np.int32),
        kv_lengths=_extended(batch.kv_lengths, 1, padding),
        block_tables=tables,
        logit_rows=np.concatenate(
            [batch.logit_rows, np.arange(batch.num_tokens, size, dtype=np.int32)]
        ),
    )


def _extended(values: Int32Array, fill: int, count: int) -> Int32Array:
    return np.concatenate([values, np.full(count, fill, dtype=np.int32)])
