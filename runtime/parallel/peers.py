"""The other ranks of an engine, as rank 0 sees them."""

import os
import select
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial

from llmbuild.errors import EngineError, RankError, UserError
from llmbuild.runtime.parallel.messages import Channel, Kind
from llmbuild.runtime.parallel.monitor import Monitor

START_S = 60.0  # in which every rank has to be ready at least
_REPORT_S = 1.0  # in which ranks that are well say that a step has failed
_INTERRUPTED = (
    "a step was interrupted, and the ranks that were at it can't go on from there; open the engine "
    "again"
)

_open: "weakref.WeakSet[Peers]" = weakref.WeakSet()


class Peers(ABC):
    """Connections to all ranks but this one, and what is known of their state.

    Once a rank has failed or a step was left half done, all are stopped and only an error is
    left. A forked process can do nothing with them, and doesn't disturb them.
    """

    def __init__(self, channels: Mapping[int, Channel], timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self._channels = dict(channels)
        self._process = os.getpid()
        self._monitor: Monitor | None = None
        self._is_closed = False
        self._fault: Callable[[], RankError | UserError] | None = None
        _open.add(self)

    @abstractmethod
    def describe(self, rank: int, is_gone: bool) -> str:
        """What has become of a rank, in a sentence with its number; it keeps silent if it isn't
        gone. Of this one: it came too late for the others."""

    @abstractmethod
    def end_waits(self, rank: int) -> None:
        """Ends what native code waits for, as the rank is gone. Called by another thread, which
        must not keep this object's owner alive."""

    @abstractmethod
    def _end(self, is_asked: bool) -> None:
        """Stops the ranks and gives up what was had for them. is_asked: they know already."""

    def forget(self) -> None:
        """Gives up the connections of a forked process."""
        for channel in self._channels.values():
            channel.close()
        if self._monitor is not None:
            self._monitor.forget()

    def wait_until_ready(self) -> None:
        """Raises EngineError, naming the rank, for one that refuses, ends or doesn't answer."""
        self.await_ready()
        self.watch()

    def watch(self) -> None:
        """Notice at once when a rank is gone, from now on."""
        self._monitor = Monitor(self._channels, self.end_waits)

    def await_ready(self) -> None:
        """As wait_until_ready does, of ranks that say so several times."""
        limit_s = max(START_S, self.timeout_s)
        deadline = time.monotonic() + limit_s
        for rank, channel in self._channels.items():
            try:
                kind, payload = channel.receive(max(0.0, deadline - time.monotonic()))
            except TimeoutError as error:
                raise EngineError(f"rank {rank} wasn't ready within {limit_s:g} s") from error
            except OSError as error:
                raise EngineError(self.describe(rank, is_gone=True)) from error
            if kind is not Kind.READY:
                raise EngineError(f"rank {rank}: {payload.decode(errors='replace')}")

    def results(self) -> list[bytearray]:
        """What each rank sends of a step, in order. Raises RankError for one that doesn't."""
        found = []
        deadline = time.monotonic() + self.timeout_s
        for rank, channel in self._channels.items():
            try:
                kind, payload = channel.receive(max(0.0, deadline - time.monotonic()))
            except OSError as error:
                raise RankError(rank) from error
            if kind is not Kind.RESULT:
                raise RankError(rank)
            found.append(payload)
        return found

    def check_usable(self) -> None:
        """Raises the error that is left, if there is one."""
        assert not self._is_closed, "the executor is closed"
        if self._process != os.getpid():
            raise UserError("the engine was opened before this process was forked; open it here")
        if self._fault is not None:
            raise self._fault()

    def broadcast(self, kind: Kind, payload: bytes = b"") -> None:
        """Raises RankError for a rank that can't be told."""
        for rank, channel in self._channels.items():
            try:
                channel.send(kind, payload, self.timeout_s)
            except OSError as error:
                raise RankError(rank) from error

    def fail(self, suspect: int) -> RankError:
        """Stops all ranks after a step in which this one waited for `suspect` in vain, and says
        why. All later use raises that."""
        rank, is_gone = self._culprit(suspect)
        what = self.describe(rank, is_gone)
        text = f"{what}; all ranks were stopped, open the engine again"
        self._fault = partial(RankError, rank, text)
        self._stop(is_asked=False)
        return RankError(rank, text)

    def settle(self) -> None:
        """After a step that was left by an exception, such as an interrupt: if all ranks have
        done it, or none, they can go on. If not, they are stopped."""
        try:
            self.broadcast(Kind.PING)
            deadline = time.monotonic() + self.timeout_s
            for channel in self._channels.values():
                kind, _ = channel.receive(max(0.0, deadline - time.monotonic()))
                if kind is not Kind.PONG:
                    raise ConnectionError(kind)
        except BaseException as error:
            self._fault = partial(UserError, _INTERRUPTED)
            self._stop(is_asked=False)
            if not isinstance(error, OSError | RankError):
                raise

    def close(self) -> None:
        """Ask the ranks to end, and end those that don't. A second call does nothing."""
        if self._process != os.getpid():
            return
        if not self._is_closed:
            self._is_closed = True
            self._stop(is_asked=True)

    def _stop(self, *, is_asked: bool) -> None:
        monitor, self._monitor = self._monitor, None
        if monitor is not None:
            monitor.close()
        if is_asked:
            for channel in self._channels.values():
                with suppress(OSError):  # where it is gone already
                    channel.send(Kind.CLOSE, timeout_s=_REPORT_S)
        self._end(is_asked)
        for channel in self._channels.values():
            channel.close()
        self._channels = {}

    def _culprit(self, suspect: int) -> tuple[int, bool]:
        """The rank that a failure began with, and whether it is gone: one that is, or that doesn't
        answer while others say that they have failed; `suspect` if that tells nothing."""
        ranks = {channel.fileno(): rank for rank, channel in self._channels.items()}
        poll = select.poll()
        for descriptor in ranks:
            poll.register(descriptor, select.POLLIN)
        deadline = time.monotonic() + _REPORT_S
        while ranks and (left_s := deadline - time.monotonic()) > 0:
            for descriptor, _ in poll.poll(left_s * 1000):
                rank = ranks.pop(descriptor)
                poll.unregister(descriptor)
                try:
                    self._channels[rank].receive(_REPORT_S)
                except OSError:
                    return rank, True
        silent = sorted(ranks.values())
        return (silent[0] if silent and suspect not in silent else suspect), False


def _forget_in_fork() -> None:
    """A fork would keep connections open that have to close when their owner is gone."""
    for peers in list(_open):
        peers.forget()
    _open.clear()  # a fork of the fork has nothing to give up any more


os.register_at_fork(after_in_child=_forget_in_fork)
