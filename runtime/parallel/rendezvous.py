"""How ranks that a launcher has started, on one host or several, find each other: over TCP.

Rank 0 listens where the launcher says. The others tell it who and where they are, and are told
the same of all; then each connects to every rank below its own. Who connects must know the
engine's digest; there is no other protection, so the network has to be a trusted one.
"""

import ipaddress
import socket
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from typing import NoReturn, TypeVar

import msgspec

from llmbuild.errors import EngineError, UserError
from llmbuild.runtime.parallel.environment import Launch
from llmbuild.runtime.parallel.messages import Channel, Kind

_STRANGER_S = 5.0  # in which one who has connected has to say who it is
_RETRY_S = 0.1
_MAX_HELLO_BYTES = 1 << 20
# A host that vanishes without a word is noticed after half a minute, whoever waits for it.
_KEEPALIVE = ((socket.TCP_KEEPIDLE, 15), (socket.TCP_KEEPINTVL, 5), (socket.TCP_KEEPCNT, 3))

_T = TypeVar("_T")


class Hello(msgspec.Struct, frozen=True):
    """A rank that comes to rank 0. digest: of the engine's manifest. port: where it waits for
    higher ranks. host: an id of its machine, and the processors that it may use there."""

    rank: int
    digest: str
    abi: str
    port: int
    host: str
    processors: list[int]


class Place(msgspec.Struct, frozen=True):
    """Where a rank is."""

    address: str
    port: int
    host: str
    processors: list[int]


class Table(msgspec.Struct, frozen=True):
    """What rank 0 tells all: where each rank is, and its options."""

    places: list[Place]
    num_blocks: int
    timeout_s: float


class Caller(msgspec.Struct, frozen=True):
    """The higher of two ranks, as it connects to the lower."""

    rank: int
    digest: str


def listen(port: int) -> socket.socket:
    """Raises UserError when the port can't be had; 0 takes any."""
    is_dual = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if is_dual else socket.AF_INET
    try:
        return socket.create_server(
            ("", port), family=family, backlog=socket.SOMAXCONN, dualstack_ipv6=is_dual
        )
    except OSError as error:
        raise UserError(
            f"rank 0 can't listen on port {port}: {error.strerror}; give another MASTER_PORT"
        ) from error


def lead(
    listener: socket.socket, launch: Launch, own: Hello, options: tuple[int, float], limit_s: float
) -> tuple[dict[int, Channel], Table, list[int]]:
    """Rank 0: channels to all others, the table, and the descriptor of a socket to each rank.

    options: the table's num_blocks and timeout_s. Raises EngineError when ranks don't come
    within limit_s, or one runs something else, which the others are told.
    """
    deadline = time.monotonic() + limit_s
    channels: dict[int, Channel] = {}
    faults: list[str] = []
    places = {0: Place(launch.address, launch.port, own.host, own.processors)}
    with _closing_on_error(channels):
        while len(places) < launch.num_ranks:
            missing = sorted({*range(launch.num_ranks)} - {*places})
            connection, address = _accept(listener, deadline, missing)
            channel = Channel(connection)
            hello = _receive(channel, Hello)
            if hello is None:  # a stranger
                channel.close()
                continue
            if hello.rank not in missing:
                fault = f"a second process says that it is rank {hello.rank} of {launch.num_ranks}"
                _refuse([*channels.values(), channel], fault)
            _keep_alive(connection)
            channels[hello.rank] = channel
            faults += _faults(hello, own)
            # Rank 0's own host is known by its name to all, and by another address to itself.
            address = launch.address if ipaddress.ip_address(address).is_loopback else address
            places[hello.rank] = Place(address, hello.port, hello.host, hello.processors)
        if faults:  # only now, so that all are there to be told
            _refuse(channels.values(), "; ".join(faults))
        table = Table([places[rank] for rank in range(launch.num_ranks)], *options)
        for channel in channels.values():
            channel.send(Kind.TABLE, msgspec.json.encode(table))
        return channels, table, _connect_all(0, table.places, listener, own.digest, deadline)


def follow(
    listener: socket.socket, launch: Launch, own: Hello, limit_s: float
) -> tuple[Channel, Table, list[int]]:
    """Another rank: its channel to rank 0, the table, and a socket to each rank.

    Raises EngineError when rank 0 isn't there within limit_s, or refuses.
    """
    deadline = time.monotonic() + limit_s
    connection = _connect(launch.address, launch.port, deadline)
    channel = Channel(connection)
    with _closing_on_error({0: channel}):
        _keep_alive(connection)
        try:
            channel.send(Kind.HELLO, msgspec.json.encode(own))
            kind, payload = channel.receive(limit_s, _MAX_HELLO_BYTES)
        except OSError as error:
            where = f"rank 0 at {launch.address}, port {launch.port}"
            raise EngineError(f"{where} doesn't go on: {error}") from error
        if kind is not Kind.TABLE:
            raise EngineError(payload.decode(errors="replace"))
        table = msgspec.json.decode(payload, type=Table)
        sockets = _connect_all(own.rank, table.places, listener, own.digest, deadline)
        return channel, table, sockets


def _faults(hello: Hello, own: Hello) -> list[str]:
    """Why a rank isn't one of rank 0's engine."""
    if hello.abi != own.abi:
        return [f"rank {hello.rank} speaks {hello.abi} and rank 0 {own.abi}; give all one llmbuild"]
    if hello.digest != own.digest:
        return [
            f"rank {hello.rank} runs the engine with digest {hello.digest} and rank 0 the one with "
            f"{own.digest}; give all ranks the same engine"
        ]
    return []


def _refuse(channels: Iterable[Channel], fault: str) -> NoReturn:
    """Raises EngineError, here and in those that have come."""
    for channel in channels:
        with suppress(OSError):  # one that is gone needs no word
            channel.send(Kind.REFUSED, fault.encode())
        channel.close()
    raise EngineError(fault)


def _connect_all(
    rank: int, places: list[Place], listener: socket.socket, digest: str, deadline: float
) -> list[int]:
    """A socket to each rank, by its descriptor, which is the caller's; -1 for the rank itself."""
    sockets: dict[int, socket.socket] = {}
    with _closing_on_error(sockets):
        for other in range(rank):
            sockets[other] = _connect(places[other].address, places[other].port, deadline)
            caller = msgspec.json.encode(Caller(rank, digest))
            Channel(sockets[other]).send(Kind.HELLO, caller)
        while len(sockets) < len(places) - 1:
            missing = sorted({*range(rank + 1, len(places))} - {*sockets})
            connection, _ = _accept(listener, deadline, missing)
            seen = _receive(Channel(connection), Caller)
            if seen is None or seen.digest != digest or seen.rank not in missing:
                connection.close()
                continue
            sockets[seen.rank] = connection
    for connection in sockets.values():
        connection.settimeout(None)
    return [-1 if r == rank else sockets[r].detach() for r in range(len(places))]


def _accept(
    listener: socket.socket, deadline: float, missing: list[int]
) -> tuple[socket.socket, str]:
    """The next who connects, and its address."""
    try:
        listener.settimeout(max(1e-3, deadline - time.monotonic()))
        connection, (address, *_) = listener.accept()
    except TimeoutError as error:
        which = ", ".join(map(str, missing))
        raise EngineError(
            f"rank {which} didn't come in time; start all ranks, and see that they reach "
            "MASTER_ADDR and each other"
        ) from error
    return connection, address.removeprefix("::ffff:")


def _connect(address: str, port: int, deadline: float) -> socket.socket:
    """Tries until the deadline, as the other may have been started later."""
    while True:
        left_s = deadline - time.monotonic()
        try:
            return socket.create_connection((address, port), max(_RETRY_S, left_s))
        except OSError as error:
            if left_s < _RETRY_S:
                raise EngineError(
                    f"no rank can be reached at {address}, port {port}: {error}"
                ) from error
        time.sleep(_RETRY_S)


def _receive(channel: Channel, kind: type[_T]) -> _T | None:
    """What one who has connected says of itself; None for a stranger."""
    try:
        _, payload = channel.receive(_STRANGER_S, _MAX_HELLO_BYTES)
        return msgspec.json.decode(payload, type=kind)
    except (OSError, msgspec.DecodeError):
        return None


def _keep_alive(connection: socket.socket) -> None:
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in _KEEPALIVE:
        connection.setsockopt(socket.IPPROTO_TCP, option, value)


@contextmanager
def _closing_on_error(connections: Mapping[int, Channel | socket.socket]) -> Iterator[None]:
    """Closes what is in `connections` by then."""
    with ExitStack() as stack:
        stack.callback(lambda: [connection.close() for connection in connections.values()])
        yield
        stack.pop_all()
