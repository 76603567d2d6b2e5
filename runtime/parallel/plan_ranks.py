"""An engine of plans that share layers, each on a GPU of its own, as one executor. Untried: no
machine here has a GPU.

Ranks meet inside their plans, in NCCL. Each has the logits of its own tokens, which it sends to
rank 0, or of a greedy step the likeliest alone.
"""

import math
import os
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from llmbuild.errors import EngineError, RankError
from llmbuild.runtime.batch import StepBatch
from llmbuild.runtime.executors.greedy import next_step
from llmbuild.runtime.executors.nccl import Communicator, unique_id
from llmbuild.runtime.executors.open_plan import open_plan
from llmbuild.runtime.executors.plan_executor import PlanExecutor
from llmbuild.runtime.parallel.messages import Kind, StepMessage
from llmbuild.runtime.parallel.peers import START_S
from llmbuild.runtime.parallel.plan_worker import COMMAND, LARGEST, PlanSetup, largest_of
from llmbuild.runtime.parallel.process import RankProcess
from llmbuild.runtime.parallel.process_peers import ProcessPeers

if TYPE_CHECKING:
    from collections.abc import Iterator

    from llmbuild.runtime.engine import Engine

_LOOK_S = 0.5  # how often a step's time is looked at


def open_plan_ranks(engine: "Engine", num_blocks: int, timeout_s: float) -> "PlanRanks":
    """Starts a process for each rank but 0, on the GPU of its number; all are ready then, or none
    is left. Raises EngineError, naming the rank, when one can't be."""
    of, num_ranks = unique_id(), len(engine.manifest.ranks)
    with ExitStack() as opened:
        peers = PlanPeers(timeout_s)
        opened.callback(peers.close)
        for rank in range(1, num_ranks):
            peers.add(rank, RankProcess(rank, [], COMMAND))
            setup = PlanSetup(
                root=os.fsencode(engine.root.absolute()),
                manifest=engine.manifest,
                variant=engine.variant,
                rank=rank,
                num_blocks=num_blocks,
                unique_id=of,
            )
            peers.set_up(rank, msgspec.msgpack.encode(setup))

        def join() -> Communicator:
            peers.await_ready()
            peers.broadcast(Kind.JOIN)
            peers.communicator = _met(of, num_ranks, max(START_S, timeout_s))
            return peers.communicator

        own = open_plan(engine, num_blocks, 0, join)
        opened.callback(own.close)
        peers.wait_until_ready()
        opened.pop_all()
    return PlanRanks(own, peers)


def _met(of: bytes, num_ranks: int, limit_s: float) -> Communicator:
    """Rank 0's end of the communicator. NCCL waits for the others however long that takes, so it is
    left waiting after `limit_s`. Raises EngineError."""
    made: list[Communicator | EngineError] = []

    def meet() -> None:
        try:
            made.append(Communicator(of, num_ranks, 0))
        except EngineError as error:
            made.append(error)

    thread = threading.Thread(target=meet, daemon=True)
    thread.start()
    thread.join(limit_s)
    if not made:
        raise EngineError(f"the ranks didn't meet in NCCL within {limit_s:g} s")
    if isinstance(made[0], EngineError):
        raise made[0]
    return made[0]


class PlanPeers(ProcessPeers):
    """communicator: rank 0's end, once it is there."""

    communicator: Communicator | None = None

    def __init__(self, timeout_s: float) -> None:
        super().__init__(timeout_s)
        self._own_failure, self._was_ended = "", False
        self.limit = _Limit(timeout_s, self.end_all_waits)

    def end_waits(self, rank: int) -> None:
        self.end_all_waits()

    def end_all_waits(self) -> None:
        """Ends what waits for other ranks on the GPU."""
        self._was_ended = True
        if self.communicator is not None:
            self.communicator.abort()

    def fail_with(self, text: str) -> RankError:
        """As `fail`, after a failure on rank 0: its own, unless what it waited for was ended, as
        another rank is gone or stuck."""
        if not self._was_ended:
            self._own_failure = text
        return self.fail(0)

    def describe(self, rank: int, is_gone: bool) -> str:
        if rank == 0 and self._own_failure:
            return f"rank 0, this process, has failed: {self._own_failure}"
        return super().describe(rank, is_gone)

    def _culprit(self, suspect: int) -> tuple[int, bool]:
        return (0, False) if self._own_failure else super()._culprit(suspect)

    def _end(self, is_asked: bool) -> None:
        self.limit.close()
        super()._end(is_asked)


class _Limit:
    """A thread that calls `end` when what was begun takes longer than `limit_s`."""

    def __init__(self, limit_s: float, end: Callable[[], None]) -> None:
        self._limit_s, self._deadline = limit_s, math.inf
        self._is_closed = threading.Event()
        self._thread = threading.Thread(target=self._watch, args=(end,), daemon=True)
        self._thread.start()

    @contextmanager
    def of_a_step(self) -> "Iterator[None]":
        self._deadline = time.monotonic() + self._limit_s
        try:
            yield
        finally:
            self._deadline = math.inf

    def close(self) -> None:
        self._is_closed.set()
        self._thread.join()

    def _watch(self, end: Callable[[], None]) -> None:
        while not self._is_closed.wait(min(_LOOK_S, self._limit_s)):
            if time.monotonic() > self._deadline:
                end()


class PlanRanks:
    """Rank 0's plan, and its connections to the other ranks. When one is gone or stuck, the step
    raises a RankError that names it, all are stopped, and so does every later step."""

    def __init__(self, own: PlanExecutor[Any], peers: PlanPeers) -> None:
        """The ranks are ready; both are closed with this."""
        self._own, self._peers = own, peers
        weakref.finalize(self, peers.close)  # at exit, where __del__ may not be called

    @property
    def graph_counts(self) -> Any:
        """Rank 0's, whose executions are those of all."""
        return self._own.graph_counts

    def step(self, batch: StepBatch) -> NDArray[np.float32]:
        """Logits [R, vocab], as Executor says; raises RankError."""
        own, others = self._run(batch, 0)
        rows = batch.num_logit_rows
        parts = [np.frombuffer(part, np.float32).reshape(rows, -1) for part in others if rows]
        return np.concatenate([own, *parts], axis=1) if rows else own

    def step_greedy(self, batch: StepBatch, num_steps: int = 1) -> list[list[int]]:
        """The likeliest tokens of each row, as Executor says; raises RankError."""
        assert num_steps == 1 or batch.is_decode
        tokens = np.zeros((batch.num_logit_rows, num_steps), np.int32)
        for step in range(num_steps):
            if step > 0:
                batch = next_step(batch, tokens[:, step - 1])
            own, others = self._run(batch, 1)
            tokens[:, step] = _likeliest([largest_of(own, 0), *others])
        return [[int(token) for token in row] for row in tokens]

    def close(self) -> None:
        """End the other ranks and give all memory back. Closing twice is allowed."""
        self._peers.close()
        self._own.close()

    def __del__(self) -> None:
        self.close()

    def _run(self, batch: StepBatch, num_steps: int) -> tuple[NDArray[np.float32], list[bytearray]]:
        """Rank 0's logits, and what the others send."""
        peers = self._peers
        peers.check_usable()
        try:
            peers.broadcast(Kind.STEP, StepMessage.of([batch], num_steps).encode())
            with peers.limit.of_a_step():
                own = self._own.step(batch)
            return own, peers.results()
        except RankError as error:
            raise peers.fail(error.rank) from None
        except EngineError as error:
            raise peers.fail_with(str(error)) from None
        except BaseException:
            peers.settle()
            raise


def _likeliest(parts: Sequence[bytes | bytearray]) -> NDArray[np.int32]:
    """Of each rank's largest logits and their tokens, row by row; ~token where it isn't finite."""
    found = [np.frombuffer(part, LARGEST) for part in parts]
    logits = np.stack([each["logit"] for each in found])
    tokens = np.stack([each["token"] for each in found])
    best = logits.argmax(axis=0)  # the first of a tie, whose token is the lowest; or a NaN
    rows = np.arange(len(best))
    chosen = tokens[best, rows]
    return np.where(np.isfinite(logits[best, rows]), chosen, ~chosen).astype(np.int32)
