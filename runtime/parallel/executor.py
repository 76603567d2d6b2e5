"""An engine of several ranks as one executor, in the process of rank 0."""

import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

from llmbuild.errors import RankError
from llmbuild.runtime.batch import StepBatch
from llmbuild.runtime.parallel.messages import Kind, StepMessage
from llmbuild.runtime.parallel.parts import split_batch
from llmbuild.runtime.parallel.peers import Peers
from llmbuild.runtime.parallel.serving import RankExecutor

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

_T = TypeVar("_T")


class ParallelExecutor:
    """Rank 0's share of an engine, and its connections to the other ranks.

    Tells them each step and computes its own share of it; what else there is to exchange native
    code does. When a rank is gone or stuck, the step raises a RankError that names it, all ranks
    are stopped, and so does every later step.
    """

    def __init__(self, own: RankExecutor, peers: Peers, num_stages: int) -> None:
        """The ranks are ready; both are closed with this."""
        self._own = own
        self._peers = peers
        self._num_stages = num_stages
        weakref.finalize(self, peers.close)  # at exit, where __del__ may not be called

    def step(self, batch: StepBatch) -> "NDArray[np.float32]":
        """Logits [R, vocab] of one step, as Executor says; raises RankError."""

        def compute(step: StepMessage) -> "NDArray[np.float32]":
            logits = self._own.step_parts(step.arrays, step.sizes, True)
            assert logits is not None, "rank 0 has the logits"
            return logits

        return self._run(self._message(batch, 0), compute)

    def step_greedy(self, batch: StepBatch, num_steps: int = 1) -> list[list[int]]:
        """The likeliest tokens of each row, as Executor says; raises RankError."""
        assert num_steps == 1 or batch.is_decode
        return self._run(
            self._message(batch, num_steps),
            lambda step: self._own.step_parts_greedy(step.arrays, step.sizes, num_steps),
        )

    def close(self) -> None:
        """End the other ranks and give all memory back. Closing twice is allowed."""
        self._peers.close()
        self._own.close()

    def __del__(self) -> None:
        self.close()

    def _message(self, batch: StepBatch, num_steps: int) -> StepMessage:
        return StepMessage.of(split_batch(batch, self._num_stages), num_steps)

    def _run(self, step: StepMessage, compute: Callable[[StepMessage], _T]) -> _T:
        self._peers.check_usable()
        try:
            self._peers.broadcast(Kind.STEP, step.encode())
            return compute(step)
        except RankError as error:
            raise self._peers.fail(error.rank) from None
        except BaseException:
            self._peers.settle()
            raise
