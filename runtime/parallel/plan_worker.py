"""The process of a rank whose plan runs on a GPU: `python -m llmbuild.runtime.parallel.plan_worker
CONTROL`, a descriptor that it inherits. Untried: no machine here has a GPU."""

import os
import signal
import socket
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from llmbuild.errors import EngineError, RankError, UserError
from llmbuild.runtime.engine import Engine
from llmbuild.runtime.executors.nccl import Communicator
from llmbuild.runtime.executors.open_plan import open_plan
from llmbuild.runtime.manifest import Manifest
from llmbuild.runtime.parallel.messages import Channel, Kind, StepMessage
from llmbuild.runtime.parallel.serving import leave_with, serve

if TYPE_CHECKING:
    from array import array

    from llmbuild.runtime.executors.plan_executor import PlanExecutor

COMMAND = (sys.executable, "-P", "-m", "llmbuild.runtime.parallel.plan_worker")
LARGEST = np.dtype([("logit", np.float32), ("token", np.int32)])  # of a row, as ranks send it


class PlanSetup(msgspec.Struct, frozen=True):
    """What the process needs to be a rank. unique_id: of the communicator that it joins."""

    root: bytes
    manifest: Manifest
    variant: str
    rank: int
    num_blocks: int
    unique_id: bytes


class ServedPlan:
    """A rank's plan as `serve` runs it: what a step gives is sent to rank 0."""

    def __init__(self, executor: "PlanExecutor[Any]", first_token: int, channel: Channel) -> None:
        self._executor, self._first_token, self._channel = executor, first_token, channel

    def step_parts(
        self, arrays: "array[int]", sizes: "array[int]", wants_logits: bool
    ) -> NDArray[np.float32] | None:
        """Raises RankError where the GPU failed; rank 0 then looks for the culprit."""
        self._channel.send(Kind.RESULT, self._logits(arrays, sizes).tobytes())
        return None

    def step_parts_greedy(
        self, arrays: "array[int]", sizes: "array[int]", num_steps: int
    ) -> list[list[int]]:
        """As step_parts, of one step."""
        logits = self._logits(arrays, sizes)
        self._channel.send(Kind.RESULT, largest_of(logits, self._first_token))
        return []

    def close(self) -> None:
        self._executor.close()

    def _logits(self, arrays: "array[int]", sizes: "array[int]") -> NDArray[np.float32]:
        (batch,) = StepMessage(0, sizes, arrays).batches()
        try:
            return self._executor.step(batch)
        except EngineError as error:
            raise RankError(0, str(error)) from error


def largest_of(logits: NDArray[np.float32], first_token: int) -> bytes:
    """Each row's largest logit, or a NaN, and its token: LARGEST."""
    found = np.empty(len(logits), LARGEST)
    tokens = logits.argmax(axis=1)
    found["logit"] = np.take_along_axis(logits, tokens[:, None], axis=1)[:, 0]
    found["token"] = tokens + first_token
    return found.tobytes()


def main(control: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for rank 0, which says what it means
    channel = Channel(socket.socket(fileno=control))
    leave_with(channel)
    run(channel)


def run(channel: Channel) -> None:
    """Be a rank until rank 0 closes. Raises ConnectionError once that is gone."""
    _, payload = channel.receive()
    setup = msgspec.msgpack.decode(payload, type=PlanSetup)
    engine = Engine(Path(os.fsdecode(setup.root)), setup.manifest, setup.variant)
    ranks = setup.manifest.ranks

    def join() -> Communicator:
        channel.send(Kind.READY)
        channel.receive()
        return Communicator(setup.unique_id, len(ranks), setup.rank)

    try:
        executor = open_plan(engine, setup.num_blocks, setup.rank, join)
    except UserError as error:
        channel.send(Kind.REFUSED, str(error).encode())
        return
    channel.send(Kind.READY)
    served = ServedPlan(executor, ranks[setup.rank].tokens.first, channel)
    failure = serve(channel, served, served.close)
    if failure is not None:
        raise failure


if __name__ == "__main__":
    try:
        main(int(sys.argv[1]))
    except ConnectionError:
        sys.exit(1)  # rank 0 is gone, and nobody is left to be told why
