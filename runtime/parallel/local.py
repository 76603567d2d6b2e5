"""All ranks on this host: rank 0 in this process, and a process for each of the others."""

import os
from contextlib import ExitStack

import msgspec

from llmbuild.errors import EngineError
from llmbuild.runtime.engine import Engine
from llmbuild.runtime.executors.cpu import CpuExecutor, ranks_bytes
from llmbuild.runtime.parallel.config import ranks_config
from llmbuild.runtime.parallel.executor import ParallelExecutor
from llmbuild.runtime.parallel.memory import RanksMemory
from llmbuild.runtime.parallel.process import RankProcess
from llmbuild.runtime.parallel.process_peers import ProcessPeers
from llmbuild.runtime.parallel.processors import Seat, choose_seats, seated, warn_if_crowded
from llmbuild.runtime.parallel.worker import Setup


def open_local_ranks(
    engine: Engine,
    num_blocks: int,
    num_threads: int | None,
    pin_threads: bool | None,
    timeout_s: float,
) -> ParallelExecutor:
    """Starts the processes and opens rank 0 here; all are ready then, or none is left.

    Raises EngineError, naming the rank, when one can't be.
    """
    num_ranks = len(engine.manifest.ranks)
    processors = sorted(os.sched_getaffinity(0))
    seats = choose_seats(processors, num_ranks, num_threads, pin_threads)
    warn_if_crowded(seats, processors)
    memory = _make_memory(engine)
    with ExitStack() as opened:
        peers = LocalPeers(memory, timeout_s)
        opened.callback(peers.close)
        for rank in range(1, num_ranks):
            peers.start(engine, rank, num_blocks, seats[rank])
        with seated(seats[0]):
            own = CpuExecutor(
                *(engine, num_blocks, seats[0].num_threads, seats[0].pin_threads),
                ranks=ranks_config(engine.manifest, 0, timeout_s, memory),
            )
        opened.callback(own.close)
        peers.wait_until_ready()
        opened.pop_all()
    return ParallelExecutor(own, peers, engine.manifest.parallel.pp)


def _make_memory(engine: Engine) -> RanksMemory:
    size_bytes = ranks_bytes(engine, 0)
    try:
        return RanksMemory.create(size_bytes)
    except OSError as error:
        raise EngineError(
            f"can't have {size_bytes} bytes of memory that the ranks share: {error}"
        ) from error


class LocalPeers(ProcessPeers):
    """The processes of the other ranks, and the memory that is shared with them."""

    def __init__(self, memory: RanksMemory, timeout_s: float) -> None:
        super().__init__(timeout_s)
        self._memory = memory

    def start(self, engine: Engine, rank: int, num_blocks: int, seat: Seat) -> None:
        """Starts a rank's process, which is to open the engine. Raises EngineError."""
        self.add(rank, RankProcess(rank, [self._memory.descriptor]))
        setup = Setup(
            root=os.fsencode(engine.root.absolute()),
            manifest=engine.manifest,
            variant=engine.variant,
            rank=rank,
            num_blocks=num_blocks,
            seat=seat,
            timeout_s=self.timeout_s,
        )
        self.set_up(rank, msgspec.msgpack.encode(setup))

    def end_waits(self, rank: int) -> None:
        self._memory.set_failed(rank)
