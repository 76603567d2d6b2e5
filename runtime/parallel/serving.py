"""The side of every rank but 0: it runs the steps that rank 0 sends."""

import os
import select
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from llmbuild.errors import InternalError, RankError
from llmbuild.runtime.parallel.messages import Channel, Kind, StepMessage

if TYPE_CHECKING:
    from array import array

    import numpy as np
    from numpy.typing import NDArray

_LEAVE_S = 1.0  # between the end of rank 0 and that of a process that doesn't leave by itself


class RankExecutor(Protocol):
    """One rank's share of the steps; as StepMessage has them."""

    def step_parts(
        self, arrays: "array[int]", sizes: "array[int]", wants_logits: bool
    ) -> "NDArray[np.float32] | None":
        """Logits [all rows, vocab] where they are wanted; that is on rank 0. Raises RankError."""
        ...

    def step_parts_greedy(
        self, arrays: "array[int]", sizes: "array[int]", num_steps: int
    ) -> list[list[int]]:
        """num_steps tokens of each row, on rank 0. Raises RankError."""
        ...

    def close(self) -> None: ...


def serve(channel: Channel, executor: RankExecutor, close: Callable[[], None]) -> RankError | None:
    """Runs steps until rank 0 says that it closes; raises ConnectionError once that is gone.

    close: gives up the executor, and what other ranks notice its end by. After a failed step that
    is done at once, and the error is returned in the end.
    """
    failure = None
    while True:
        kind, payload = channel.receive()
        if kind is Kind.CLOSE:
            close()
            return failure
        if kind is Kind.PING:
            channel.send(Kind.PONG)
        elif kind is Kind.STEP:
            try:
                _run(executor, StepMessage.decode(payload))
            except RankError as error:
                channel.send(Kind.FAILED, str(error).encode())
                close()
                failure = error
        else:
            raise InternalError(f"rank 0 sent {kind!r} between steps")


def _run(executor: RankExecutor, message: StepMessage) -> None:
    if message.num_steps == 0:
        executor.step_parts(message.arrays, message.sizes, False)
    else:
        executor.step_parts_greedy(message.arrays, message.sizes, message.num_steps)


def leave_with(channel: Channel) -> None:
    """Ends this process soon after the other end of the channel, whatever it is busy with."""
    threading.Thread(target=_leave_with, args=(channel.fileno(),), daemon=True).start()


def _leave_with(descriptor: int) -> None:
    poll = select.poll()
    poll.register(descriptor, select.POLLRDHUP)
    poll.poll()
    time.sleep(_LEAVE_S)
    os._exit(1)
