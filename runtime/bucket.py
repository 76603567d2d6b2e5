"""Padding of decode steps to the batch sizes that were compiled ahead of time."""

from array import array
from bisect import bisect_left
from collections.abc import Sequence

from llmbuild.runtime.batch import StepBatch, as_tables
from llmbuild.runtime.manifest import SCRATCH_BLOCK


def pad_to_bucket(batch: StepBatch, buckets: Sequence[int]) -> StepBatch:
    """A pure-decode batch padded to the next of `buckets` (ascending); others unchanged.

    Padding is sequences of one token (id 0, position 0) in the scratch block alone, which want
    logits too, so the step stays a pure decode: the caller cuts the rows past its own.
    """
    index = bisect_left(buckets, batch.num_sequences)
    if not batch.is_decode or index == len(buckets):
        return batch
    size = buckets[index]
    padding = size - batch.num_sequences
    if padding == 0:
        return batch
    width = batch.blocks_per_sequence

    def extended(name: str, fill: int, count: int = padding) -> "array[int]":
        return array("i", [*batch.numbers(name), *[fill] * count])

    tables = extended("block_tables", SCRATCH_BLOCK, padding * width)
    return StepBatch(
        token_ids=extended("token_ids", 0),
        positions=extended("positions", 0),
        query_start=array("i", range(size + 1)),
        kv_lengths=extended("kv_lengths", 1),
        block_tables=as_tables(tables.tobytes(), width),
        logit_rows=array("i", [*batch.numbers("logit_rows"), *range(batch.num_tokens, size)]),
    )
