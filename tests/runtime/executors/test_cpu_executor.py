"""Greedy steps of a compiled engine against its own logits."""

from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from llmbuild.runtime.batch import StepBatch
from llmbuild.runtime.engine import open_engine
from llmbuild.runtime.executors.cpu import CpuExecutor

VOCAB, BLOCK_SIZE = 257, 4
TABLES = ((7, 2, 9, 4, 1), (8, 3, 5, 11, 6), (10, 12, 13, 14, 15))


def int32(values: Sequence[int]) -> np.ndarray:
    return np.array(values, np.int32)


def ragged(parts: Sequence[tuple[int, int]], seed: int = 0) -> StepBatch:
    """Sequences given as (first position, tokens); the last token of each wants logits."""
    rng = np.random.default_rng(seed)
    counts = [count for _, count in parts]
    starts = np.cumsum([0, *counts])
    return StepBatch(
        token_ids=rng.integers(0, VOCAB, sum(counts)).astype(np.int32),
        positions=int32([start + i for start, count in parts for i in range(count)]),
        query_start=int32(starts),
        kv_lengths=int32([start + count for start, count in parts]),
        block_tables=int32(TABLES[: len(parts)]),
        logit_rows=int32(starts[1:] - 1),
    )


def decode(tokens: Sequence[int], lengths: Sequence[int]) -> StepBatch:
    return StepBatch(
        token_ids=int32(tokens),
        positions=int32(lengths),
        query_start=int32(range(len(tokens) + 1)),
        kv_lengths=int32(lengths) + 1,
        block_tables=int32(TABLES[: len(tokens)]),
        logit_rows=int32(range(len(tokens))),
    )


@pytest.fixture(params=[1, 2, 3])
def executor(tiny_engine: Path, request: pytest.FixtureRequest) -> Iterator[CpuExecutor]:
    pin = request.param == 2
    with closing(CpuExecutor(open_engine(tiny_engine), 16, request.param, pin)) as executor:
        yield executor


def test_greedy_tokens_are_the_largest_logits(executor: CpuExecutor) -> None:
    for seed in range(20):
        batch = ragged([(0, 3), (0, 1), (0, 7)], seed)
        expected = executor.step(batch).argmax(axis=1)
        assert executor.step_greedy(batch) == [[token] for token in expected]


def test_step_without_logits_gives_no_tokens(executor: CpuExecutor) -> None:
    batch = ragged([(0, 5)])
    silent = StepBatch(
        **{
            name: getattr(batch, name)
            for name in ("token_ids", "positions", "query_start", "kv_lengths", "block_tables")
        },
        logit_rows=int32([]),
    )
    assert executor.step(silent).shape == (0, VOCAB)
    assert executor.step_greedy(silent) == []


@pytest.mark.parametrize("num_steps", [2, 5, 8])
def test_several_steps_are_as_many_single_steps(executor: CpuExecutor, num_steps: int) -> None:
    """Across the ends of blocks; tokens and every byte of the KV pools."""
    lengths = [3, 1, 7]
    first = [row[0] for row in executor.step_greedy(ragged([(0, n) for n in lengths]))]
    start = executor._kv.copy()

    tokens, single = first, []
    for step in range(num_steps):
        rows = executor.step_greedy(decode(tokens, [n + step for n in lengths]))
        tokens = [row[0] for row in rows]
        single.append(tokens)
    after = executor._kv.copy()

    executor._kv[:] = start
    batch = decode(first, lengths)
    before = batch.data[:]
    together = executor.step_greedy(batch, num_steps)
    assert together == [list(row) for row in zip(*single, strict=True)]
    assert np.array_equal(executor._kv, after)
    assert batch.data == before, "the batch is the caller's"


def test_row_that_is_no_number_is_told_and_the_others_go_on(executor: CpuExecutor) -> None:
    batch = ragged([(0, 6), (0, 6)])
    sound = executor.step_greedy(batch)
    follow = decode([row[0] for row in sound], [6, 6])
    expected = executor.step_greedy(follow, 3)
    pools = executor._kv.view(np.float32).reshape(-1, 16, 2 * BLOCK_SIZE * 14)
    executor.step(batch)
    pools[:, TABLES[0][0]] = np.nan  # all that the first sequence's first block holds
    spoilt = executor.step_greedy(follow, 3)
    assert all(token < 0 and 0 <= ~token < VOCAB for token in spoilt[0])
    assert spoilt[1] == expected[1]


def test_executor_is_closed_twice_without_harm(tiny_engine: Path) -> None:
    executor = CpuExecutor(open_engine(tiny_engine), 4, 1)
    executor.close()
    executor.close()
    with pytest.raises(AssertionError, match="closed"):
        executor.step_greedy(ragged([(0, 1)]))
