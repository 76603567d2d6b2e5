"""The process of a rank that rank 0 has started on its host: `python -m
llmbuild.runtime.parallel.worker CONTROL MEMORY`, two descriptors that it inherits."""

import os
import signal
import socket
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from llmbuild.errors import UserError
from llmbuild.runtime.engine import Engine
from llmbuild.runtime.manifest import Manifest
from llmbuild.runtime.parallel.memory import RanksMemory
from llmbuild.runtime.parallel.messages import Channel, Kind
from llmbuild.runtime.parallel.processors import Seat, seated
from llmbuild.runtime.parallel.serving import leave_with, serve

if TYPE_CHECKING:
    from llmbuild.runtime.executors.cpu import CpuExecutor


class Setup(msgspec.Struct, frozen=True):
    """What the process needs to be a rank. The manifest is in it, as that of an engine under
    verification isn't written yet."""

    root: bytes  # the engine's path; names of files needn't be text
    manifest: Manifest
    variant: str
    rank: int
    num_blocks: int
    seat: Seat
    timeout_s: float


def main(control: int, memory: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for rank 0, which says what it means
    channel = Channel(socket.socket(fileno=control))
    leave_with(channel)
    _, payload = channel.receive()
    setup = msgspec.msgpack.decode(payload, type=Setup)
    shared = RanksMemory(memory)
    with seated(setup.seat):
        try:
            executor = _open(setup, shared)
        except UserError as error:
            channel.send(Kind.REFUSED, str(error).encode())
            return
        channel.send(Kind.READY)
        failure = serve(channel, executor, executor.close)
    if failure is not None:
        raise failure


def _open(setup: Setup, memory: RanksMemory) -> "CpuExecutor":
    from llmbuild.runtime.executors.cpu import CpuExecutor
    from llmbuild.runtime.parallel.config import ranks_config

    engine = Engine(Path(os.fsdecode(setup.root)), setup.manifest, setup.variant)
    ranks = ranks_config(setup.manifest, setup.rank, setup.timeout_s, memory)
    seat = setup.seat
    return CpuExecutor(
        *(engine, setup.num_blocks, seat.num_threads, seat.pin_threads),
        rank=setup.rank,
        ranks=ranks,
    )


if __name__ == "__main__":
    try:
        main(int(sys.argv[1]), int(sys.argv[2]))
    except ConnectionError:
        sys.exit(1)  # rank 0 is gone, and nobody is left to be told why
