"""Micro-batches are the batch, in other pieces."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from llmbuild.runtime.batch import StepBatch
from llmbuild.runtime.parallel.parts import split_batch

BLOCK_SIZE = 4


def int32(values) -> np.ndarray:
    return np.array(values, np.int32)


def make_batch(sequences: list[tuple[int, int]], wanted: list[bool], seed: int = 0) -> StepBatch:
    """Sequences as (first position, tokens), each in blocks of its own; wanted: of each token."""
    starts = np.cumsum([0, *(count for _, count in sequences)])
    lengths = [first + count for first, count in sequences]
    blocks = [-(-length // BLOCK_SIZE) for length in lengths]
    tables = np.zeros((len(sequences), max(blocks)), np.int32)
    free = iter(np.random.default_rng(seed).permutation(sum(blocks)) + 1)
    for table, count in zip(tables, blocks, strict=True):
        table[:count] = [next(free) for _ in range(count)]
    return StepBatch(
        token_ids=int32(range(100, 100 + starts[-1])),
        positions=int32([first + i for first, count in sequences for i in range(count)]),
        query_start=int32(starts),
        kv_lengths=int32(lengths),
        block_tables=tables,
        logit_rows=int32(np.flatnonzero(wanted)),
    )


@st.composite
def batches(draw) -> StepBatch:
    sizes = st.tuples(st.integers(0, 9), st.integers(1, 7))
    sequences = draw(st.lists(sizes, min_size=1, max_size=6))
    total = sum(count for _, count in sequences)
    return make_batch(sequences, draw(st.lists(st.booleans(), min_size=total, max_size=total)))


def tokens_of(batch: StepBatch) -> list[tuple[int, int, tuple[int, ...]]]:
    """Each token with its position and its sequence's blocks."""
    owners = np.repeat(np.arange(batch.num_sequences), np.diff(batch.query_start))
    tables = [tuple(table) for table in batch.block_tables.tolist()]
    return [
        (token, position, tables[owner])
        for token, position, owner in zip(
            batch.token_ids.tolist(), batch.positions.tolist(), owners, strict=True
        )
    ]


@given(batches(), st.integers(1, 9))
@example(make_batch([(3, 1)] * 5, [True] * 5), 3)
@example(make_batch([(0, 7)], [False] * 7), 7)
def test_parts_put_together_are_the_batch(batch, count):
    parts = split_batch(batch, count)
    sizes = [part.num_tokens for part in parts]
    assert len(parts) == min(count, batch.num_tokens)
    assert max(sizes) - min(sizes) <= 1
    assert [token for part in parts for token in tokens_of(part)] == tokens_of(batch)
    starts = np.cumsum([0, *sizes])
    rows = [
        row for part, first in zip(parts, starts, strict=False) for row in part.logit_rows + first
    ]
    assert rows == batch.logit_rows.tolist()


@given(batches(), st.integers(1, 9))
def test_every_part_is_a_step_of_its_own(batch, count):
    for part in split_batch(batch, count):
        starts = part.query_start.tolist()
        assert starts[0] == 0
        assert starts[-1] == part.num_tokens >= 1
        assert all(b > a for a, b in pairwise(starts))
        assert part.kv_lengths.tolist() == [part.positions[end - 1] + 1 for end in starts[1:]]
        assert len(part.block_tables) == part.num_sequences == len(starts) - 1


@pytest.mark.parametrize("count", [1, 2, 3, 4, 13])
def test_parts_one_after_the_other_compute_what_the_batch_does(make_rig, count):
    batch = make_batch([(0, 7), (0, 1), (0, 11), (0, 3)], [True, False] * 11)
    whole, apart = (make_rig(num_blocks=9, block_size=BLOCK_SIZE).executor for _ in range(2))
    expected = whole.step(batch)
    logits = np.concatenate([apart.step(part) for part in split_batch(batch, count)])
    np.testing.assert_array_equal(logits, expected)
    np.testing.assert_array_equal(apart.kv, whole.kv)


@pytest.mark.parametrize(("sequences", "count"), [(1, 2), (2, 2), (5, 2), (5, 3), (7, 7)])
def test_parts_of_a_decode_step_are_decode_steps(sequences, count):
    batch = make_batch([(n, 1) for n in range(sequences)], [True] * sequences)
    assert all(part.is_decode for part in split_batch(batch, count))


def test_batch_whose_rows_are_in_another_order_stays_whole():
    batch = make_batch([(0, 5)], [True, False, False, True, False])
    arrays = {name: batch.numbers(name) for name in ("token_ids", "positions", "query_start")}
    swapped = StepBatch(
        **arrays,
        kv_lengths=batch.kv_lengths,
        block_tables=batch.block_tables,
        logit_rows=int32([3, 0]),
    )
    assert split_batch(swapped, 2) == [swapped]
    assert len(split_batch(batch, 2)) == 2
