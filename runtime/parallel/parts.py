"""Micro-batches: what pipeline stages work on at the same time."""

from array import array
from bisect import bisect_left, bisect_right
from itertools import pairwise

from llmbuild.runtime.batch import StepBatch, as_tables


def split_batch(batch: StepBatch, count: int) -> list[StepBatch]:
    """The batch as `count` parts of nearly as many tokens, in order, or as many as it has tokens.

    A sequence that is cut goes on in the next part, which must be computed after this one. Rows
    of logits come out in the batch's order; a batch whose logit_rows don't ascend stays whole.
    """
    assert count >= 1
    total = batch.num_tokens
    count = min(count, total)
    if count == 1 or any(b < a for a, b in pairwise(batch.numbers("logit_rows"))):
        return [batch]
    cuts = [total * index // count for index in range(count + 1)]
    return [_part(batch, first, end) for first, end in pairwise(cuts)]


def _part(batch: StepBatch, first: int, end: int) -> StepBatch:
    """The tokens from `first` to `end`, and of each sequence what it has among them."""
    starts, rows = batch.numbers("query_start"), batch.numbers("logit_rows")
    sequence, stop = bisect_right(starts, first) - 1, bisect_left(starts, end)
    kv_lengths = array("i", batch.numbers("kv_lengths")[sequence:stop])
    kv_lengths[-1] -= starts[stop] - end  # what comes of it in the next part
    inner = (start - first for start in starts[sequence + 1 : stop])
    wanted = rows[bisect_left(rows, first) : bisect_left(rows, end)]
    width = batch.blocks_per_sequence
    tables = batch.numbers("block_tables")[sequence * width : stop * width]
    return StepBatch(
        token_ids=batch.numbers("token_ids")[first:end],
        positions=batch.numbers("positions")[first:end],
        query_start=array("i", [0, *inner, end - first]),
        kv_lengths=kv_lengths,
        block_tables=as_tables(tables.tobytes(), width),
        logit_rows=array("i", [row - first for row in wanted]),
    )
