"""A process that rank 0 starts for another rank of its host."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress

from llmbuild.errors import EngineError
from llmbuild.runtime.parallel.messages import Channel

# -P: modules in the folder where the user happens to be are not for it.
COMMAND = (sys.executable, "-P", "-m", "llmbuild.runtime.parallel.worker")
_END_S = 2.0  # for a process that was asked to end
_EXIT_S = 0.5  # from when a process closes its files until the system tells its status
_KILL_S = 5.0  # for the system to take a process away


class RankProcess:
    """It inherits its end of `channel` and other descriptors, which are the command's last
    arguments. What it prints is kept, for the case that it ends early."""

    def __init__(
        self, rank: int, descriptors: Sequence[int], command: Sequence[str] = COMMAND
    ) -> None:
        """Raises EngineError when it can't be started."""
        self._output = os.memfd_create(f"llmbuild rank {rank}")
        ours, theirs = socket.socketpair()
        self.channel = Channel(ours)
        try:
            inherited = (theirs.fileno(), *descriptors)
            self._process = subprocess.Popen(
                [*command, *map(str, inherited)],
                stdin=subprocess.DEVNULL,
                stdout=self._output,
                stderr=self._output,
                pass_fds=inherited,
            )
        except OSError as error:
            self.channel.close()
            os.close(self._output)
            raise EngineError(f"can't start a process for rank {rank}: {error}") from error
        finally:
            theirs.close()

    @property
    def id(self) -> int:
        return self._process.pid

    def how_it_ended(self) -> str:
        """By which signal or with which status, and its last line of output."""
        self.wait(time.monotonic() + _EXIT_S)
        status = self._process.poll()
        if status is None:
            return "has closed its connection"
        ended = f"ended with status {status}"
        how = ended if status >= 0 else f"was ended by {_signal_name(-status)}"
        size = os.fstat(self._output).st_size
        lines = os.pread(self._output, size, 0).decode(errors="replace").strip().splitlines()
        return ": ".join([how, *lines[-1:]])

    def wait(self, deadline: float) -> None:
        """Until it has ended, or time.monotonic() is at the deadline."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(max(0.0, deadline - time.monotonic()))

    def end(self) -> None:
        """Kill it unless it has ended, and leave nothing of it. Twice is allowed."""
        if self._process.poll() is None:
            self._process.kill()
            self.wait(time.monotonic() + _KILL_S)
        if self._output >= 0:
            os.close(self._output)
            self._output = -1


def end_all(processes: Sequence[RankProcess], *, is_asked: bool) -> None:
    """End processes; those that are asked to end get some time for it."""
    deadline = time.monotonic() + (_END_S if is_asked else 0.0)
    for process in processes:
        process.wait(deadline)
    for process in processes:
        process.end()


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
