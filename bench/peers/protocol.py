"""The runner's side of a driver: a process that is asked, and stopped while others compute."""

import json
import os
import select
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from bench.peers.work_folder import CHECKOUT, last_line

EXIT_LIMIT_S = 5


class DriverError(Exception):
    """A driver that didn't answer as asked. is_over: it can't be asked again."""

    def __init__(self, message: str, is_over: bool) -> None:
        super().__init__(message)
        self.is_over = is_over


class Driver:
    """A driver's process group, started at once; it computes only while it's asked.

    command: to which the pipe for replies is added. ready: its first reply. load_s: from the
    start to that, or to the first token of the process that has the model, where the driver says
    so.
    """

    def __init__(self, command: Sequence[str | Path], log: Path, start_limit_s: float) -> None:
        self._log = log
        self._unread = b""
        self._replies, reply_fd = os.pipe()
        start = time.perf_counter()
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                [*map(str, command), str(reply_fd)],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                cwd=CHECKOUT,
                pass_fds=(reply_fd,),
                start_new_session=True,
            )
        os.close(reply_fd)
        self.ready = self._read(start_limit_s)
        self.load_s = float(self.ready["load_s"] or time.perf_counter() - start)
        self._signal(signal.SIGSTOP)

    @property
    def group(self) -> int:
        """Its process group's id."""
        return self._process.pid

    def ask(self, request: Mapping[str, object], limit_s: float) -> dict[str, Any]:
        """The reply; DriverError if there is none in that time, or it is an error."""
        assert self._process.stdin is not None
        self._signal(signal.SIGCONT)
        try:
            self._process.stdin.write(json.dumps(request).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise self._ended() from None
        reply = self._read(limit_s)
        self._signal(signal.SIGSTOP)
        if "error" in reply:
            raise DriverError(str(reply["error"]), is_over=False)
        return reply

    def close(self) -> None:
        """Ends all of its processes; a second call does nothing."""
        if self._replies < 0:
            return
        self._signal(signal.SIGKILL)
        self._process.wait()
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # what it never read
            self._process.stdin.close()
        os.close(self._replies)
        self._replies = -1

    def _read(self, limit_s: float) -> dict[str, Any]:
        end = time.perf_counter() + limit_s
        while b"\n" not in self._unread:
            left = end - time.perf_counter()
            if left <= 0 or not select.select([self._replies], [], [], left)[0]:
                self.close()
                raise DriverError(f"no answer in {limit_s:g} s (see {self._log})", is_over=True)
            read = os.read(self._replies, 1 << 16)
            if not read:
                raise self._ended()
            self._unread += read
        line, _, self._unread = self._unread.partition(b"\n")
        reply = json.loads(line)
        assert isinstance(reply, dict)
        return reply

    def _ended(self) -> DriverError:
        with suppress(subprocess.TimeoutExpired):  # it has closed its pipe and lives on
            self._process.wait(EXIT_LIMIT_S)
        self.close()
        code = self._process.returncode
        return DriverError(f"it ended with {code}: {last_line(self._log)}", is_over=True)

    def _signal(self, number: signal.Signals) -> None:
        with suppress(ProcessLookupError):  # all of it has ended
            os.killpg(self._process.pid, number)
