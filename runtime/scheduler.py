"""The scheduler: which tokens of which sequences the next step computes."""

from array import array
from collections import deque
from collections.abc import Sequence as Items

import msgspec

from llmbuild.errors import RequestError
from llmbuild.runtime.batch import StepBatch, as_tables
from llmbuild.runtime.kv.manager import KVManager
from llmbuild.runtime.manifest import SCRATCH_BLOCK, Limits
from llmbuild.runtime.sequence import Sequence, State


class Part(msgspec.Struct, frozen=True):
    """The next `num_tokens` tokens of one sequence. reaches_end: after this part no token is
    pending, so the next one can be sampled."""

    sequence: Sequence
    num_tokens: int
    reaches_end: bool


class Step(msgspec.Struct, frozen=True):
    """A step that is scheduled: its input, and the sequence of each row of logits.

    num_steps: how many steps in a row the blocks are there for; more than one in a pure decode of
    greedy sequences alone, none of which they take past its max_tokens.
    """

    parts: list[Part]
    sampled: list[Sequence]
    batch: StepBatch
    is_greedy: bool
    num_steps: int


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

    def schedule(self, max_steps: int = 1) -> Step | None:
        """The next step, or None when no sequence is left.

        max_steps: how many to run in a row, where they can.
        """
        parts = self._continue_running()
        # After a preemption nobody comes in: first in line is the victim, and fewer blocks are
        # free than it gave up.
        self._admit_waiting(parts)
        if not parts:
            left = len(self.running) + len(self.waiting)
            assert left == 0, f"{left} sequences are left but none can move"
            return None
        sampled = [part.sequence for part in parts if part.reaches_end]
        is_greedy = all(sequence.params.temperature == 0 for sequence in sampled)
        is_decode = len(sampled) == sum(part.num_tokens for part in parts)
        num_steps = self._grow_ahead(sampled, max_steps) if is_greedy and is_decode else 1
        return Step(parts, sampled, build_batch(parts, self.manager), is_greedy, num_steps)

    def advance(self, step: Step) -> None:
        """Note that the step has been computed, as often as it says."""
        more = step.num_steps - 1
        for part in step.parts:
            part.sequence.num_computed_tokens += part.num_tokens + more

    def finish(self, sequence: Sequence) -> None:
        """End a sequence, whatever the reason; its blocks are free afterwards."""
        assert sequence.state is not State.FINISHED, f"sequence {sequence.id} ends twice"
        if sequence.state is State.RUNNING:
            self.running.remove(sequence)
            self.manager.free(sequence.id)
        else:
            self.waiting.remove(sequence)
        sequence.state = State.FINISHED

    def reset(self) -> None:
        """Forget all sequences, which have ended otherwise, and free all blocks."""
        self.running = []
        self.waiting = deque()
        self.manager.reset()

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
        pending = sequence.num_pending_tokens
        assert pending > 0
        count = min(pending, self.chunk_tokens, budget)
        return Part(sequence, count, count == pending)

    def _grow_ahead(self, sequences: Items[Sequence], max_steps: int) -> int:
        """How many steps these decoding sequences can go on: until the first reaches its
        max_tokens, while there are blocks for all. Takes the blocks."""
        num_steps = max_steps
        for sequence in sequences:
            num_steps = min(num_steps, sequence.params.max_tokens - sequence.num_output_tokens)
        grow, num_missing = self.manager.grow, self.manager.num_missing
        while num_steps > 1:
            # The last token that they give is sampled, not computed.
            missing = sum(num_missing(s.id, len(s.tokens) + num_steps - 1) for s in sequences)
            if missing <= self.manager.pool.num_free:
                for sequence in sequences:
                    grow(sequence.id, len(sequence.tokens) + num_steps - 1)
                break
            num_steps -= 1
        return num_steps

    def _preempt_last(self) -> None:
        victim = self.running.pop()
        self.manager.free(victim.id)
        victim.num_computed_tokens = 0
        victim.num_preemptions += 1
        victim.state = State.WAITING
        self.waiting.appendleft(victim)


def build_batch(parts: list[Part], manager: KVManager) -> StepBatch:
    """The step's arrays; block tables are padded with the scratch block to the longest."""
    token_ids, positions, kv_lengths = array("i"), array("i"), array("i")
    query_start, logit_rows = array("i", [0]), array("i")
    tables: list[array[int]] = []
    for part in parts:
        sequence, start = part.sequence, part.sequence.num_computed_tokens
        stop = start + part.num_tokens
        token_ids.extend(sequence.tokens[start:stop])
        positions.extend(range(start, stop))
        kv_lengths.append(stop)
        query_start.append(len(token_ids))
        if part.reaches_end:
            logit_rows.append(len(token_ids) - 1)
        tables.append(manager.table(sequence.id))
    width = max(map(len, tables))
    padding = array("i", [SCRATCH_BLOCK]) * width
    rows = b"".join([(table + padding[len(table) :]).tobytes() for table in tables])
    return StepBatch(
        token_ids=token_ids,
        positions=positions,
        query_start=query_start,
        kv_lengths=kv_lengths,
        block_tables=as_tables(rows, width),
        logit_rows=logit_rows,
    )
