"""What every driver speaks: JSON, a request a line on stdin and a reply a line on a pipe.

The replies have a pipe of their own, as engines print to stdout. Runs inside the peers'
environments, so only the standard library is here.
"""

import ctypes
import json
import os
import signal
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TextIO

PR_SET_PDEATHSIG = 1
FIRST_TOKEN = 1000  # the prompt whose completion ends the loading; any ordinary token


@dataclass(frozen=True)
class Setup:
    """What every engine has to be ready for.

    max_sequence: tokens of the longest request. kv_tokens: of all requests that come together.
    processors: those to pin threads to, as many as `threads`.
    """

    threads: int
    processors: list[int]
    max_sequence: int
    max_requests: int
    kv_tokens: int


@dataclass(frozen=True)
class Generation:
    """Requests that were submitted together: seconds from there to the first output token of any,
    and to the last of all, and each one's number of output tokens."""

    first_s: float
    total_s: float
    output_tokens: list[int]


class Engine(Protocol):
    """A loaded model. load_s: from the start of its process to its first token where that process
    isn't the driver's. pid: of the process that served last."""

    versions: str
    load_s: float | None
    pid: int

    def generate(self, prompts: list[list[int]], new_tokens: list[int]) -> Generation:
        """Greedy, that many output tokens for each prompt, whatever token ends a text."""


def serve(load: Callable[[str, Setup], Engine]) -> None:
    """Loads a model, says so after the first token, and answers until stdin ends.

    The arguments are the model's path, a Setup as JSON and the pipe's file descriptor.
    """
    die_with_parent()
    model, setup, reply_fd = sys.argv[1:]
    with os.fdopen(int(reply_fd), "w") as replies:
        engine = load(model, Setup(**json.loads(setup)))
        engine.generate([[FIRST_TOKEN]], [1])
        _reply(replies, {"versions": engine.versions, "load_s": engine.load_s})
        for line in sys.stdin:
            try:
                answer = _answer(engine, json.loads(line))
            except Exception as error:
                traceback.print_exc()
                answer = {"error": f"{type(error).__name__}: {error}"}
            _reply(replies, answer)


def die_with_parent() -> None:
    """A driver that was stopped would otherwise outlive a killed runner."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def _reply(replies: TextIO, fields: dict[str, object]) -> None:
    replies.write(json.dumps(fields) + "\n")
    replies.flush()


def _answer(engine: Engine, request: dict[str, Any]) -> dict[str, object]:
    if request["do"] == "memory":
        return _memory(engine.pid)
    prompts, new_tokens = request["prompts"], request["new_tokens"]
    if len(prompts) == 1:  # caches, clocks and shapes as they are amid work
        engine.generate(prompts, [1])
    runs = [engine.generate(prompts, new_tokens) for _ in range(request["repeats"])]
    for run in runs:
        if run.output_tokens != new_tokens:
            raise RuntimeError(f"{run.output_tokens} output tokens where {new_tokens} were asked")
    return {"first_s": [run.first_s for run in runs], "total_s": [run.total_s for run in runs]}


def _memory(pid: int) -> dict[str, object]:
    """Bytes, now and at most so far."""
    fields = dict(
        line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines()
    )
    resident, peak = (int(fields[name].split()[0]) << 10 for name in ("VmRSS", "VmHWM"))
    return {"resident_bytes": resident, "peak_bytes": peak}
