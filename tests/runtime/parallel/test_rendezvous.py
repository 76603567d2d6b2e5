"""Ranks that are started each by itself find each other, or say why not."""

import socket
import threading
import time
from collections.abc import Callable

import pytest

from llmbuild.errors import EngineError, LlmbuildError, UserError
from llmbuild.runtime.parallel import rendezvous
from llmbuild.runtime.parallel.environment import Launch
from llmbuild.runtime.parallel.messages import Channel, Kind
from llmbuild.runtime.parallel.rendezvous import Hello, follow, lead, listen

WAIT_S = 30
DIGEST = "d" * 64


def hello(rank: int, port: int, **changes) -> Hello:
    values = {"digest": DIGEST, "abi": "abi-4", "host": "here", "processors": [rank]}
    return Hello(rank=rank, port=port, **values | changes)


class Meeting:
    """Ranks in threads that come together; results are what each got, or its error."""

    def __init__(self, num_ranks: int, limit_s: float = WAIT_S) -> None:
        self.num_ranks = num_ranks
        self.limit_s = limit_s
        self.listener = listen(0)
        self.port = self.listener.getsockname()[1]
        self.results: dict[int, object] = {}
        self.threads: list[threading.Thread] = []

    def start(self, rank: int, key: int | None = None, **changes) -> None:
        """key: under which the result is kept, by default the rank."""
        run = self._lead if rank == 0 else self._follow
        arguments = (rank, rank if key is None else key, changes)
        self.threads.append(threading.Thread(target=run, args=arguments))
        self.threads[-1].start()

    def join(self) -> dict[int, object]:
        for thread in self.threads:
            thread.join(WAIT_S)
            assert not thread.is_alive()
        self.listener.close()
        return self.results

    def launch(self, rank: int) -> Launch:
        return Launch(rank, self.num_ranks, "127.0.0.1", self.port)

    def _lead(self, rank: int, key: int, changes: dict[str, object]) -> None:
        own = hello(rank, self.port, **changes)
        options = (17, 2.5)
        self._keep(key, lambda: lead(self.listener, self.launch(0), own, options, self.limit_s))

    def _follow(self, rank: int, key: int, changes: dict[str, object]) -> None:
        with listen(0) as listener:
            own = hello(rank, listener.getsockname()[1], **changes)
            self._keep(key, lambda: follow(listener, self.launch(rank), own, self.limit_s))

    def _keep(self, key: int, run: Callable[[], object]) -> None:
        try:
            self.results[key] = run()
        except LlmbuildError as error:
            self.results[key] = error


@pytest.mark.parametrize("num_ranks", [2, 3, 5])
@pytest.mark.parametrize("is_leader_last", [True, False])
def test_every_rank_gets_a_socket_to_every_other(num_ranks, is_leader_last):
    meeting = Meeting(num_ranks)
    ranks = [*range(num_ranks)][::-1] if is_leader_last else range(num_ranks)
    for rank in ranks:
        meeting.start(rank)
    results = meeting.join()
    channels, table, own_sockets = results[0]
    assert (table.num_blocks, table.timeout_s) == (17, 2.5)
    assert [place.processors for place in table.places] == [[rank] for rank in range(num_ranks)]
    assert all(results[rank][1] == table for rank in range(1, num_ranks))
    sockets = [own_sockets, *(results[rank][2] for rank in range(1, num_ranks))]
    ends = [[fd if fd < 0 else socket.socket(fileno=fd) for fd in row] for row in sockets]
    for one in range(num_ranks):
        assert ends[one][one] == -1
        for other in range(num_ranks):
            if one != other:
                assert ends[one][other].getblocking()
                ends[one][other].sendall(bytes([one, other]))
    for one in range(num_ranks):
        for other in range(num_ranks):
            if one != other:
                assert ends[other][one].recv(9) == bytes([one, other])
                ends[other][one].close()
    for rank in range(1, num_ranks):
        channels[rank].send(Kind.PING)
        assert results[rank][0].receive(WAIT_S)[0] is Kind.PING


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"digest": "e" * 64}, ["e" * 64, DIGEST, "the same engine"]),
        ({"abi": "abi-3"}, ["abi-3", "abi-4", "one llmbuild"]),
    ],
)
def test_rank_of_something_else_is_refused_everywhere_with_both_named(changes, told):
    meeting = Meeting(3)
    meeting.start(0)
    meeting.start(2, **changes)
    time.sleep(0.3)
    meeting.start(1)  # it comes when the wrong one has come
    for error in meeting.join().values():
        assert isinstance(error, EngineError)
        assert str(error).startswith("rank 2 ")
        assert [part for part in told if part not in str(error)] == []


@pytest.mark.parametrize("rank", [1, 3, 0])
def test_rank_that_there_is_already_or_cannot_be_is_refused(rank):
    meeting = Meeting(3)
    meeting.start(0)
    meeting.start(1)
    time.sleep(0.3)
    with listen(0) as listener:
        own = hello(rank, listener.getsockname()[1])
        with pytest.raises(EngineError, match=f"second process says that it is rank {rank} of 3"):
            follow(listener, meeting.launch(rank), own, WAIT_S)
    assert all(isinstance(error, EngineError) for error in meeting.join().values())


def test_rank_that_does_not_come_is_named():
    meeting = Meeting(4, limit_s=0.7)
    meeting.start(0)
    meeting.start(2)
    results = meeting.join()
    assert "rank 1, 3 didn't come in time" in str(results[0])
    assert "doesn't go on" in str(results[2])


def test_rank_0_that_is_not_there_is_told_with_its_address():
    with listen(0) as free:
        port = free.getsockname()[1]
    started_s = time.monotonic()
    with listen(0) as listener, pytest.raises(EngineError, match=rf"127\.0\.0\.1, port {port}"):
        follow(listener, Launch(1, 2, "127.0.0.1", port), hello(1, 1), 0.5)
    assert 0.3 < time.monotonic() - started_s < 10


def test_name_that_means_no_host_is_told():
    launch = Launch(1, 2, "no-such-host.invalid", 1)
    with listen(0) as listener, pytest.raises(EngineError, match=r"no-such-host\.invalid"):
        follow(listener, launch, hello(1, 1), 0.3)


@pytest.mark.parametrize(
    "said", [b"", b"GET / HTTP/1.1\r\n\r\n", b"\x02\0\0\0\x02\0\0\0{}", b"\xff"]
)
def test_strangers_who_connect_are_no_harm(said, monkeypatch):
    monkeypatch.setattr(rendezvous, "_STRANGER_S", 0.2)
    meeting = Meeting(2)
    meeting.start(0)
    strangers = [socket.create_connection(("127.0.0.1", meeting.port)) for _ in range(3)]
    for stranger in strangers:
        stranger.sendall(said)
    meeting.start(1)
    results = meeting.join()
    assert not any(isinstance(result, Exception) for result in results.values())
    for stranger in strangers:
        stranger.close()


def test_port_that_is_taken_is_told():
    with listen(0) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(UserError, match=f"can't listen on port {port}: .*MASTER_PORT"):
            listen(port)


def test_other_service_at_the_port_of_rank_0_is_told():
    with listen(0) as other, listen(0) as listener:
        launch = Launch(1, 2, "127.0.0.1", other.getsockname()[1])
        answer = threading.Thread(target=lambda: other.accept()[0].sendall(b"SSH-2.0-OpenSSH\r\n"))
        answer.start()
        with pytest.raises(EngineError, match="doesn't go on: what came is no message"):
            follow(listener, launch, hello(1, 1), WAIT_S)
        answer.join()


def test_address_of_a_rank_on_the_host_of_rank_0_is_one_that_others_can_use():
    """To rank 0 it has come from 127.0.0.1, where others find themselves."""
    meeting = Meeting(2)
    launch = Launch(0, 2, "localhost", meeting.port)
    meeting.launch = lambda rank: launch
    meeting.start(0)
    meeting.start(1)
    table = meeting.join()[0][1]
    assert [place.address for place in table.places] == ["localhost", "localhost"]


def test_channel_of_a_rank_is_found_dead_when_its_host_vanishes():
    meeting = Meeting(2)
    meeting.start(0)
    meeting.start(1)
    results = meeting.join()
    for channel in (results[0][0][1], results[1][0]):
        assert isinstance(channel, Channel)
        connection = channel._connection
        assert connection.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) <= 30
        assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
