"""An executor of several ranks over ranks that are threads: who is told what, and what is said and
done when one fails."""

import os
import socket
import threading
import time
from array import array
from contextlib import suppress

import numpy as np
import pytest

from llmbuild.errors import EngineError, RankError, UserError
from llmbuild.runtime.batch import StepBatch
from llmbuild.runtime.parallel import peers as peers_module
from llmbuild.runtime.parallel.executor import ParallelExecutor
from llmbuild.runtime.parallel.messages import Channel, Kind, StepMessage
from llmbuild.runtime.parallel.peers import Peers
from llmbuild.runtime.parallel.serving import serve

WORLD = 4
VOCAB = 7
WAIT_S = 30  # for what should take far less on any machine


class Meeting:
    """Where ranks wait for each other in a step, as native code does."""

    def __init__(self) -> None:
        self.arrived: set[int] = set()
        self.failed: int | None = None  # for whom nobody waits
        self.changed = threading.Condition()

    def attend(self, rank: int, num_ranks: int, timeout_s: float) -> None:
        """Until all are here; raises RankError."""
        with self.changed:
            self.arrived.add(rank)
            self.changed.notify_all()
            is_over = self.changed.wait_for(
                lambda: self.failed is not None or len(self.arrived) == num_ranks, timeout_s
            )
            if not is_over:
                self.failed = min({*range(num_ranks)} - self.arrived)
                self.changed.notify_all()
            if self.failed is not None:
                raise RankError(self.failed)

    def fail(self, rank: int) -> None:
        with self.changed:
            self.failed = rank if self.failed is None else self.failed
            self.changed.notify_all()


class MeetingExecutor:
    """A rank's share of each step: to meet the others in the step's meeting."""

    def __init__(
        self, rank: int, meetings: list[Meeting], num_ranks: int, timeout_s: float
    ) -> None:
        self.rank = rank
        self.meetings = meetings
        self.num_ranks = num_ranks
        self.timeout_s = timeout_s
        self.seen: list[tuple[array, array, bool | int]] = []
        self.before_step = lambda: None
        self.after_step = lambda: None
        self.is_closed = False

    def step_parts(self, arrays, sizes, wants_logits):
        self._attend(arrays, sizes, wants_logits)
        rows = sum(sizes[2::4])
        return np.full((rows, VOCAB), 5.0, np.float32) if wants_logits else None

    def step_parts_greedy(self, arrays, sizes, num_steps):
        self._attend(arrays, sizes, num_steps)
        return [[3] * num_steps] * sum(sizes[2::4])

    def close(self):
        self.is_closed = True

    def _attend(self, arrays, sizes, option):
        self.before_step()
        self.seen.append((arrays, sizes, option))
        meeting = self.meetings[len(self.seen) - 1]
        meeting.attend(self.rank, self.num_ranks, self.timeout_s)
        self.after_step()


class ThreadPeers(Peers):
    """Ranks that are threads of this process."""

    def __init__(self, channels, meetings, timeout_s) -> None:
        super().__init__(channels, timeout_s)
        self.meetings = meetings
        self.ended: list[bool] = []

    def describe(self, rank, is_gone):
        return f"rank {rank} {'is gone' if is_gone else 'keeps silent'}"

    def end_waits(self, rank):
        for meeting in self.meetings:
            meeting.fail(rank)

    def _end(self, is_asked):
        self.ended.append(is_asked)


class Rig:
    def __init__(self, num_ranks: int = WORLD, timeout_s: float = 0.2, stages: int = 1) -> None:
        self.meetings = [Meeting() for _ in range(20)]
        make = [MeetingExecutor(r, self.meetings, num_ranks, timeout_s) for r in range(num_ranks)]
        self.own, *self.others = make
        self.threads: list[threading.Thread] = []
        self.far_ends: dict[int, socket.socket] = {}
        self.results: dict[int, object] = {}
        channels = {}
        for rank, executor in enumerate(self.others, 1):
            near, self.far_ends[rank] = socket.socketpair()
            channels[rank] = Channel(near)
            thread = threading.Thread(target=self._serve, args=(rank, executor), daemon=True)
            self.threads.append(thread)
        self.peers = ThreadPeers(channels, self.meetings, timeout_s)
        for thread in self.threads:
            thread.start()
        self.peers.wait_until_ready()
        self.executor = ParallelExecutor(self.own, self.peers, stages)

    def _serve(self, rank, executor):
        channel = Channel(self.far_ends[rank])
        try:
            channel.send(Kind.READY)
            self.results[rank] = serve(channel, executor, executor.close)
        except BaseException as error:
            self.results[rank] = error
        finally:
            channel.close()

    def vanish(self, rank):
        """As a process does that is killed: its connection ends, and nothing is said."""
        self.far_ends[rank].shutdown(socket.SHUT_RDWR)

    def join(self):
        for thread in self.threads:
            thread.join(WAIT_S)
            assert not thread.is_alive()


@pytest.fixture
def make_rig():
    made = []

    def make(**options):
        made.append(Rig(**options))
        return made[-1]

    yield make
    for rig in made:
        rig.executor.close()
        rig.join()


def batch_of(tokens: int) -> StepBatch:
    """A decode step."""
    numbers = np.arange(tokens, dtype=np.int32)
    return StepBatch(
        token_ids=numbers,
        positions=numbers,
        query_start=np.arange(tokens + 1, dtype=np.int32),
        kv_lengths=numbers + np.int32(1),
        block_tables=numbers[:, None] + np.int32(1),
        logit_rows=numbers,
    )


@pytest.mark.parametrize("stages", [1, 2, 3])
def test_all_ranks_run_the_same_parts_of_each_step(make_rig, stages):
    rig = make_rig(stages=stages)
    logits = rig.executor.step(batch_of(5))
    assert logits.shape == (5, VOCAB)
    assert rig.executor.step_greedy(batch_of(2), 8) == [[3] * 8] * 2
    assert rig.executor.step_greedy(batch_of(1)) == [[3]]
    sizes = [len(sizes) // 4 for _, sizes, _ in rig.own.seen]
    assert sizes == [stages, min(stages, 2), 1]
    assert [option for *_, option in rig.own.seen] == [True, 8, 1]
    for other in rig.others:
        assert [seen[:2] for seen in other.seen] == [seen[:2] for seen in rig.own.seen]
        assert [option for *_, option in other.seen] == [False, 8, 1]


def test_closing_asks_the_ranks_to_end_and_waits_for_nobody_twice(make_rig):
    rig = make_rig()
    rig.executor.close()
    rig.join()
    assert [rig.results[rank] for rank in (1, 2, 3)] == [None] * 3
    assert all(executor.is_closed for executor in (rig.own, *rig.others))
    rig.executor.close()
    assert rig.peers.ended == [True]
    with pytest.raises(AssertionError, match="closed"):
        rig.executor.step(batch_of(1))


def test_dropped_executor_is_closed(make_rig):
    rig = make_rig()
    peers, own = rig.peers, rig.own
    rig.executor = None
    rig.join()
    assert peers.ended == [True]
    assert own.is_closed
    rig.executor = ParallelExecutor(own, peers, 1)


@pytest.mark.parametrize("rank", [1, 2, 3])
@pytest.mark.parametrize("moment", ["idle", "in a step"])
def test_rank_that_is_gone_is_named_at_once_and_ends_the_others(make_rig, rank, moment):
    rig = make_rig(timeout_s=WAIT_S)
    rig.executor.step(batch_of(2))
    if moment == "idle":
        rig.vanish(rank)
    else:
        other = rig.others[rank - 1]
        other.before_step = lambda: (rig.vanish(rank), time.sleep(0.5))
    started_s = time.monotonic()
    with pytest.raises(RankError, match=f"rank {rank} is gone; all ranks were stopped") as caught:
        rig.executor.step(batch_of(2))
    assert time.monotonic() - started_s < WAIT_S / 2
    assert caught.value.rank == rank
    assert rig.peers.ended == [False]
    with pytest.raises(RankError, match=f"rank {rank} is gone"):
        rig.executor.step_greedy(batch_of(1))
    rig.join()
    assert rig.peers.ended == [False]


def test_rank_that_is_gone_is_named_though_others_are_busy_for_long(make_rig, monkeypatch):
    monkeypatch.setattr(peers_module, "_REPORT_S", 0.2)
    rig = make_rig(timeout_s=WAIT_S)
    leave = threading.Event()
    rig.others[0].before_step = rig.others[1].before_step = lambda: leave.wait(WAIT_S)
    rig.vanish(3)
    with pytest.raises(RankError, match="rank 3 is gone"):
        rig.executor.step(batch_of(2))
    leave.set()


@pytest.mark.parametrize("rank", [1, 2, 3])
def test_rank_that_is_stuck_is_named_though_another_was_waited_for(make_rig, rank, monkeypatch):
    """The own executor blames rank 1 whoever it is; the ranks that are well say that they failed,
    and the one that doesn't is it."""
    monkeypatch.setattr(peers_module, "_REPORT_S", 0.3)
    rig = make_rig(timeout_s=0.2)
    leave = threading.Event()
    rig.others[rank - 1].before_step = lambda: leave.wait(WAIT_S)
    attend = rig.own._attend

    def blame_another(*arguments):
        with suppress(RankError):
            attend(*arguments)
        raise RankError(1)

    rig.own._attend = blame_another
    with pytest.raises(RankError, match=f"rank {rank} keeps silent"):
        rig.executor.step(batch_of(2))
    leave.set()


def test_rank_that_takes_no_message_is_stuck(make_rig):
    """Without a limit rank 0 would wait for ever for room in the connection."""
    rig = make_rig(timeout_s=0.2)
    leave = threading.Event()
    rig.others[1].before_step = lambda: leave.wait(WAIT_S)
    rig.peers.broadcast(Kind.STEP, StepMessage.of([batch_of(1)], 1).encode())
    with pytest.raises(RankError, match="rank 2 keeps silent"):
        rig.executor.step(batch_of(1 << 18))
    leave.set()


def test_rank_whose_step_fails_gives_its_executor_up_and_says_so(make_rig):
    rig = make_rig(timeout_s=0.2)
    leave = threading.Event()
    rig.others[2].before_step = lambda: leave.wait(WAIT_S)
    with pytest.raises(RankError):
        rig.executor.step(batch_of(1))
    leave.set()
    rig.join()
    assert [executor.is_closed for executor in rig.others[:2]] == [True, True]
    assert isinstance(rig.results[1], ConnectionError)


def test_own_rank_is_named_where_the_others_have_waited_for_it(make_rig):
    rig = make_rig(timeout_s=0.2)
    rig.own.before_step = lambda: time.sleep(0.6)
    with pytest.raises(RankError, match="rank 0 keeps silent"):
        rig.executor.step(batch_of(1))


def test_interrupt_after_the_step_leaves_the_ranks_usable(make_rig):
    rig = make_rig(timeout_s=WAIT_S)

    def interrupt():
        rig.own.after_step = lambda: None
        raise KeyboardInterrupt

    rig.own.after_step = interrupt
    with pytest.raises(KeyboardInterrupt):
        rig.executor.step(batch_of(3))
    assert rig.executor.step_greedy(batch_of(3), 2) == [[3, 3]] * 3
    assert all(len(executor.seen) == 2 for executor in rig.others)


def test_interrupt_before_anyone_was_told_leaves_the_ranks_usable(make_rig, monkeypatch):
    rig = make_rig(timeout_s=WAIT_S)
    broadcast = rig.peers.broadcast

    def interrupt(kind, payload=b""):
        monkeypatch.setattr(rig.peers, "broadcast", broadcast)
        raise KeyboardInterrupt

    monkeypatch.setattr(rig.peers, "broadcast", interrupt)
    with pytest.raises(KeyboardInterrupt):
        rig.executor.step(batch_of(3))
    assert rig.executor.step_greedy(batch_of(3), 2) == [[3, 3]] * 3


def test_interrupt_while_others_are_at_the_step_stops_all(make_rig):
    """They wait for rank 0, which won't come."""
    rig = make_rig(timeout_s=0.2)

    def interrupt():
        raise KeyboardInterrupt

    rig.own.before_step = interrupt
    with pytest.raises(KeyboardInterrupt):
        rig.executor.step(batch_of(3))
    with pytest.raises(UserError, match="a step was interrupted"):
        rig.executor.step(batch_of(3))
    rig.join()


def test_forked_process_is_refused_and_disturbs_nothing(make_rig):
    rig = make_rig(timeout_s=WAIT_S)
    child = os.fork()
    if child == 0:
        code = 1
        try:
            rig.executor.step(batch_of(1))
        except UserError as error:
            code = 0 if "forked" in str(error) else 2
        rig.executor.close()
        os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert rig.executor.step_greedy(batch_of(2), 2) == [[3, 3]] * 2


@pytest.mark.parametrize(
    ("answer", "told"),
    [
        (lambda end: Channel(end).send(Kind.REFUSED, b"no such file"), "rank 2: no such file"),
        (lambda end: end.close(), "rank 2 is gone"),
        (lambda end: None, r"rank 2 wasn't ready within 0\.2 s"),
    ],
)
def test_rank_that_does_not_come_up_is_named(monkeypatch, answer, told):
    monkeypatch.setattr(peers_module, "START_S", 0.2)
    pairs = {rank: socket.socketpair() for rank in (1, 2)}
    peers = ThreadPeers({rank: Channel(near) for rank, (near, _) in pairs.items()}, [], 0.1)
    Channel(pairs[1][1]).send(Kind.READY)
    answer(pairs[2][1])
    with pytest.raises(EngineError, match=told):
        peers.wait_until_ready()
    peers.close()
    assert peers.ended == [True]
    for _, far in pairs.values():
        far.close()
