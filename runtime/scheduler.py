"""The scheduler: which tokens of which sequences the next step computes."""

from collections import deque
from dataclasses import dataclass

import numpy as np

from llmbuild.errors import RequestError
from llmbuild.runtime.batch import StepBatch
from llmbuild.runtime.kv.manager import KVManager
from llmbuild.runtime.manifest import SCRATCH_BLOCK, Limits
from llmbuild.runtime.sequence import Sequence, State


@dataclass(frozen=True, slots=True)
class Part:
    """The next `num_tokens` tokens of one sequence."""

    sequence: Sequence
    num_tokens: int

    @property
    def reaches_end(self) -> bool:
        """After this part no token is pending, so the next one can be sampled."""
        return self.num_tokens == self.sequence.num_pending_tokens


@dataclass(frozen=True, slots=True)
class Step:
    """A step that is scheduled: its input, and the sequence of each row of logits."""

    parts: tuple[Part, ...]
    sampled: tuple[Sequence, ...]
    batch: StepBatch


class Scheduler:
    """First come, first served; sequences that run come before those that wait.

    A sequence is admitted when blocks for all its tokens are free. When a running one needs a
    block and none is free, the running sequence that arrived last is preempted: it gives up its
    blocks and waits, first in line, to be computed again from its tokens.

    Invariants: `running` then `waiting` is the order of arrival, so the sequence that arrived
    first is never preempted by another and always moves (no livelock); exactly the running
    sequences hold blocks.
    """

    def __init__(self, limits: Limits, manager: KVManager, chunk_tokens: int | None = None) -> None:
        """chunk_tokens: most tokens of one sequence in a step; by default max_step_tokens."""
        self.limits = limits
        self.manager = manager
        self.chunk_tokens = limits.max_step_tokens if chunk_tokens is None else chunk_tokens
        assert self.chunk_tokens >= 1
        self.running: list[Sequence] = []
        self.waiting: deque[Sequence] = deque()

    def check_fits(self, num_prompt_tokens: int, max_tokens: int) -> None:
        """Raises RequestError for a request that could never be completed."""
        total = num_prompt_tokens + max_tokens
        longest = self.limits.max_sequence_length
        request = f"the prompt has {num_prompt_tokens} tokens and max_tokens is {max_tokens}"
        if total > longest:
            raise RequestError(
                f"{request}, {total} together; the engine's max_sequence_length is {longest}: "
                "shorten the prompt or lower max_tokens"
            )
        # The last token is sampled but never computed, so it needs no place in the cache.
        needed = self.manager.num_blocks_for(total - 1)
        usable = self.manager.pool.num_usable
        if needed > usable:
            raise RequestError(
                f"{request}, which need {needed} KV blocks of {self.manager.block_size} tokens; "
                f"the pool has {usable}: give more KV memory, shorten the prompt or lower "
                "max_tokens"
            )

    def add(self, sequence: Sequence) -> None:
        """Queue a new sequence that check_fits has let pass."""
        assert sequence.state is State.WAITING
        self.waiting.append(sequence)

    def schedule(self) -> Step | None:
        """The next step, or None when no sequence is left."""
        parts = self._continue_running()
        # After a preemption nobody comes in: first in line is the victim, and fewer blocks are
        # free than it gave up.
        self._admit_waiting(parts)
        if not parts:
            left = len(self.running) + len(self.waiting)
            assert left == 0, f"{left} sequences are left but none can move"
            return None
        return Step(
            parts=tuple(parts),
            sampled=tuple(part.sequence for part in parts if part.reaches_end),
            batch=build_batch(parts, self.manager),
        )

    def advance(self, step: Step) -> None:
        """Note that the step has been computed."""
        for part in step.parts:
            part.sequence.num_computed_tokens += part.num_tokens

    def finish(self, sequence: Sequence) -> None:
        """End a sequence, whatever the reason; its blocks are free afterwards."""
        assert sequence.state is not State.FINISHED, f"sequence {sequence.id} ends twice"
        if sequence.state is State.RUNNING:
            self.running.remove(sequence)
            self.manager.free(sequence.id)
        else:
            self.waiting.remove(sequence)
        sequence.state = State.FINISHED

    def check(self) -> None:
        self.manager.check()
        ids = [sequence.id for sequence in (*self.running, *self.waiting)]
        assert ids == sorted(set(ids)), "the queues aren't in order of arrival"
        assert len(self.running) <= self.limits.max_sequences
        assert self.manager.holders == {sequence.id for sequence in self.running}
        assert all(sequence.state is State.RUNNING for sequence in self.running)
        for sequence in self.waiting:
            assert sequence.state is State.WAITING
            assert sequence.num_computed_tokens == 0

    def _continue_running(self) -> list[Part]:
        """Parts of running sequences within the token budget."""
        parts: list[Part] = []
        budget = self.limits.max_step_tokens
        index = 0
        while index < len(self.running) and budget > 0:
            sequence = self.running[index]
            if not self.manager.grow(sequence.id, len(sequence.tokens)):
                # The victim comes at or after `index`, so it isn't in this step's parts.
                self._preempt_last()
                continue
            parts.append(self._part(sequence, budget))
            budget -= parts[-1].num_tokens
            index += 1
        return parts

    def _admit_waiting(self, parts: list[Part]) -> None:
        """Let waiting sequences in, in order, while tokens, sequences and blocks suffice."""
        budget = self.limits.max_step_tokens - sum(part.num_tokens for part in parts)
        while self.waiting and budget > 0 and len(self.running) < self.limits.max_sequences:
            sequence = self.waiting[0]
            if not self.manager.grow(sequence.id, len(sequence.tokens)):
                break
            self.waiting.popleft()
            self.running.append(sequence)
            sequence.state = State.RUNNING
            parts.append(self._part(sequence, budget))
            budget -= parts[-1].num_tokens

    def _part(self, sequence: Sequence, budget: int) -> Part:
        assert sequence.num_pending_tokens > 0
        return Part(sequence, min(sequence.num_pending_tokens, self.chunk_tokens, budget))

    def _preempt_last(self) -> None:
        victim = self.running.pop()
        self.manager.free(victim.id)
        victim.num_computed_tokens = 0
        victim.num_preemptions += 1
        victim.state = State.WAITING
        self.waiting.appendleft(victim)


def build_batch(parts: list[Part], manager: KVManager) -> StepBatch:
    """The step's arrays; block tables are padded with the scratch block to the longest."""
    lengths = [part.sequence.num_computed_tokens + part.num_tokens for part in parts]
    token_ids: list[int] = []
    positions: list[int] = []
    query_start = [0]
    logit_rows: list[int] = []
    width = manager.num_blocks_for(max(lengths))
    tables = np.full((len(parts), width), SCRATCH_BLOCK, dtype=np.int32)
    for row, (part, length) in enumerate(zip(parts, lengths, strict=True)):
        span = range(part.sequence.num_computed_tokens, length)
        token_ids += part.sequence.tokens[span.start : span.stop]
        positions += span
        query_start.append(len(token_ids))
        if part.reaches_end:
            logit_rows.append(len(token_ids) - 1)
        num_blocks = manager.num_blocks_for(length)
        tables[row, :num_blocks] = manager.table(part.sequence.id)[:num_blocks]
    return StepBatch(
        token_ids=np.array(token_ids, dtype=np.int32),
        positions=np.array(positions, dtype=np.int32),
        query_start=np.array(query_start, dtype=np.int32),
        kv_lengths=np.array(lengths, dtype=np.int32),
        block_tables=tables,
        logit_rows=np.array(logit_rows, dtype=np.int32),
    )
