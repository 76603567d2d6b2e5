"""One rank of several that a launcher has started, each by itself."""

import os
import socket
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path

from llmbuild.errors import EngineError, UserError
from llmbuild.runtime.engine import Engine
from llmbuild.runtime.executors.cpu import ABI, CpuExecutor
from llmbuild.runtime.parallel.config import ranks_config
from llmbuild.runtime.parallel.environment import Launch
from llmbuild.runtime.parallel.executor import ParallelExecutor
from llmbuild.runtime.parallel.messages import Channel, Kind
from llmbuild.runtime.parallel.peers import START_S, Peers
from llmbuild.runtime.parallel.processors import Seat, choose_seats, seated, warn_if_crowded
from llmbuild.runtime.parallel.rendezvous import Hello, Place, Table, follow, lead, listen
from llmbuild.runtime.parallel.serving import leave_with, serve

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")  # the same in all containers of a machine


def open_launched_rank(
    engine: Engine,
    launch: Launch,
    num_blocks: int,
    num_threads: int | None,
    pin_threads: bool | None,
    timeout_s: float,
) -> ParallelExecutor:
    """On rank 0 the executor, once all ranks are ready; its num_blocks and timeout_s are all's.
    On others raises SystemExit when rank 0 has closed, or is gone.

    Raises EngineError when the ranks don't come together.
    """
    limit_s = max(START_S, timeout_s)
    options = (num_blocks, timeout_s)
    try:
        with listen(launch.port if launch.rank == 0 else 0) as listener:
            own = _hello(engine, launch.rank, listener)
            if launch.rank == 0:
                channels, table, sockets = lead(listener, launch, own, options, limit_s)
            else:
                channel, table, sockets = follow(listener, launch, own, limit_s)
    except OSError as error:
        raise EngineError(f"a rank was lost before all had come together: {error}") from error
    seat = choose_own_seat(table.places, launch.rank, num_threads, pin_threads)
    if launch.rank > 0:
        raise SystemExit(_serve(engine, launch.rank, table, seat, channel, sockets))
    with ExitStack() as opened:
        peers = HostPeers(channels, timeout_s, sockets, table.places)
        opened.callback(peers.close)
        executor = _open(engine, 0, table, seat, sockets)
        opened.callback(executor.close)
        peers.wait_until_ready()
        opened.pop_all()
    return ParallelExecutor(executor, peers, engine.manifest.parallel.pp)


class HostPeers(Peers):
    """Other ranks that this process hasn't started."""

    def __init__(
        self,
        channels: dict[int, Channel],
        timeout_s: float,
        sockets: Sequence[int],
        places: Sequence[Place],
    ) -> None:
        """sockets: descriptors of native code's, which are closed with this."""
        super().__init__(channels, timeout_s)
        self._sockets = [socket.socket(fileno=each) for each in sockets if each >= 0]
        self._places = places

    def describe(self, rank: int, is_gone: bool) -> str:
        if rank == 0:
            return f"rank 0, this process, kept the others waiting for {self.timeout_s:g} s"
        silent = f"didn't answer within {self.timeout_s:g} s (rank_timeout_s)"
        how = "is gone" if is_gone else silent
        return f"rank {rank} (at {self._places[rank].address}) {how}"

    def end_waits(self, rank: int) -> None:
        for each in self._sockets:
            _shut(each)

    def forget(self) -> None:
        super().forget()
        for each in self._sockets:
            each.close()

    def _end(self, is_asked: bool) -> None:
        for each in self._sockets:
            each.close()


def _serve(
    engine: Engine, rank: int, table: Table, seat: Seat, channel: Channel, sockets: list[int]
) -> str | int:
    """Serves rank 0 to the end; gives the exit status, or the text of a failure."""
    leave_with(channel)
    connections = [socket.socket(fileno=each) for each in sockets if each >= 0]
    try:
        executor = _open(engine, rank, table, seat, sockets)
    except UserError as error:
        channel.send(Kind.REFUSED, str(error).encode())
        raise

    def close() -> None:
        executor.close()
        for each in connections:
            each.close()

    try:
        channel.send(Kind.READY)
        failure = serve(channel, executor, close)
    except ConnectionError:
        return f"Error: rank {rank}: rank 0 is gone"
    return 0 if failure is None else f"Error: rank {rank}: {failure}"


def _open(engine: Engine, rank: int, table: Table, seat: Seat, sockets: list[int]) -> CpuExecutor:
    ranks = ranks_config(engine.manifest, rank, table.timeout_s, sockets)
    with seated(seat):
        return CpuExecutor(
            *(engine, table.num_blocks, seat.num_threads, seat.pin_threads), rank=rank, ranks=ranks
        )


def _hello(engine: Engine, rank: int, listener: socket.socket) -> Hello:
    return Hello(
        rank=rank,
        digest=engine.manifest.digest,
        abi=ABI,
        port=listener.getsockname()[1],
        host=_host_id(),
        processors=sorted(os.sched_getaffinity(0)),
    )


def _host_id() -> str:
    """Of this machine; its name where the kernel doesn't tell."""
    try:
        return _BOOT_ID.read_text().strip()
    except OSError:
        return socket.gethostname()


def choose_own_seat(
    places: Sequence[Place], rank: int, num_threads: int | None, pin_threads: bool | None
) -> Seat:
    """Ranks of a host that may use the same processors share them; a launcher that gives each
    rank processors of its own has dealt them already."""
    own = places[rank]
    sharers = [
        other
        for other, place in enumerate(places)
        if (place.host, place.processors) == (own.host, own.processors)
    ]
    seats = choose_seats(own.processors, len(sharers), num_threads, pin_threads)
    if sharers[0] == rank:
        warn_if_crowded(seats, own.processors)
    return seats[sharers.index(rank)]


def _shut(connection: socket.socket) -> None:
    """Ends the stream both ways, for whoever waits at either end."""
    with suppress(OSError):  # where it has ended
        connection.shutdown(socket.SHUT_RDWR)
