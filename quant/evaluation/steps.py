"""Packs sequences of known tokens into steps that an engine runs, and pairs the logits that come
back with the tokens that they predict."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from llmbuild.runtime.batch import Int32Array, StepBatch
from llmbuild.runtime.executors import Executor
from llmbuild.runtime.manifest import SCRATCH_BLOCK, Limits


@dataclass(frozen=True, slots=True)
class KnownSequence:
    """Tokens of one sequence. Those before `start` are in its blocks already, and those from
    `first_scored` on are predicted. The last one isn't computed, as nothing follows it."""

    tokens: Int32Array  # [n]
    start: int  # 0 .. n - 2
    first_scored: int  # start + 1 .. n; n: none
    blocks: Sequence[int]  # physical, of the logical ones in order; may hold more than it needs


@dataclass(frozen=True, slots=True)
class Part:
    """Tokens `start` .. `stop` - 1 of one sequence, computed in one step."""

    sequence: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class ScoredRows:
    """What one step says: logits [R, vocab], the token that was to follow [R], and the index of
    its sequence [R]."""

    logits: NDArray[np.float32]
    targets: Int32Array
    owners: Int32Array


def plan_steps(
    spans: Iterable[tuple[int, int]], max_step_tokens: int, max_sequences: int
) -> Iterator[list[Part]]:
    """Sequences in order, packed into steps of at most so many tokens and sequences.

    spans: of each sequence, the first token to compute and the one after the last.
    """
    parts: list[Part] = []
    budget = max_step_tokens
    for sequence, (start, end) in enumerate(spans):
        while start < end:
            stop = min(end, start + budget)
            parts.append(Part(sequence, start, stop))
            budget -= stop - start
            start = stop
            if budget == 0 or len(parts) == max_sequences:
                yield parts
                parts, budget = [], max_step_tokens
    if parts:
        yield parts


def run(
    executor: Executor, limits: Limits, block_size: int, sequences: Sequence[KnownSequence]
) -> Iterator[ScoredRows]:
    """Compute the sequences in as few steps as the engine's limits allow."""
    spans = spans_of(sequences)
    for parts in plan_steps(spans, limits.max_step_tokens, limits.max_sequences):
        yield run_step(executor, block_size, sequences, parts)


def spans_of(sequences: Iterable[KnownSequence]) -> list[tuple[int, int]]:
    return [(sequence.start, len(sequence.tokens) - 1) for sequence in sequences]


def run_step(
    executor: Executor, block_size: int, sequences: Sequence[KnownSequence], parts: list[Part]
) -> ScoredRows:
    """One step: logits for the scored predictions of its parts alone."""
    parts_of = [(part, sequences[part.sequence]) for part in parts]
    offsets = np.cumsum([0, *(part.stop - part.start for part in parts)], dtype=np.int32)
    # The first position of each part whose logits are wanted; past its end where none are.
    firsts = [min(max(p.start, s.first_scored - 1), p.stop) for p, s in parts_of]
    wanted = list(zip(parts_of, firsts, offsets.tolist(), strict=False))
    batch = StepBatch(
        token_ids=np.concatenate([s.tokens[p.start : p.stop] for p, s in parts_of]),
        positions=_concatenated(np.arange(p.start, p.stop) for p in parts),
        query_start=offsets,
        kv_lengths=np.array([part.stop for part in parts], dtype=np.int32),
        block_tables=_tables(parts_of, block_size),
        logit_rows=_concatenated(
            np.arange(first, p.stop) - p.start + offset for (p, _), first, offset in wanted
        ),
    )
    targets = [s.tokens[first + 1 : p.stop + 1] for (p, s), first, _ in wanted]
    owners = [np.full(p.stop - first, p.sequence) for (p, _), first, _ in wanted]
    return ScoredRows(executor.step(batch), np.concatenate(targets), _concatenated(owners))


def blocks_for(num_tokens: int, block_size: int) -> int:
    return -(-num_tokens // block_size)


def _tables(parts: list[tuple[Part, KnownSequence]], block_size: int) -> Int32Array:
    width = blocks_for(max(part.stop for part, _ in parts), block_size)
    tables = np.full((len(parts), width), SCRATCH_BLOCK, dtype=np.int32)
    for row, (part, sequence) in zip(tables, parts, strict=True):
        needed = blocks_for(part.stop, block_size)
        row[:needed] = sequence.blocks[:needed]
    return tables


def _concatenated(arrays: Iterable[NDArray[np.generic]]) -> Int32Array:
    return np.concatenate(list(arrays)).astype(np.int32)
