"""Ranks as processes of their own, for tests of what they do with each other."""

import ctypes
import mmap
import os
import signal
import socket
import time
from collections.abc import Callable, Sequence
from itertools import combinations

import numpy as np
from kernel_harness import Library
from numpy.typing import NDArray

from llmbuild.runtime.executors.cpu import RanksConfig

WAYS = ("memory", "sockets")
PATIENCE_S = 60  # for what should take far less on any machine
# C++ that Ranks needs of a library.
NEEDED_BYTES = """
#include "common/make_ranks.h"
extern "C" int needed_bytes(int tp, int pp, int max_floats) {
  return int(ranks_bytes(tp, pp, max_floats));
}
"""

Body = Callable[[NDArray, int], int]


class Ranks:
    """The way between ranks, and a process for each of them.

    A body is called with a RanksConfig, as the harness takes structures, and the rank.
    """

    def __init__(
        self,
        library: Library,
        way: str,
        *,
        tp: int = 1,
        pp: int = 1,
        max_floats: int = 1000,
        timeout_s: float = PATIENCE_S,
        token_firsts: Sequence[int] = (),
    ) -> None:
        self.tp, self.pp, self.timeout_s = tp, pp, timeout_s
        self.token_firsts = token_firsts or range(tp + 1)
        self.memory: mmap.mmap | None = None
        self.sockets: dict[tuple[int, int], socket.socket] = {}
        if way == "memory":
            size = library.call("needed_bytes", tp, pp, max_floats)
            self.memory = mmap.mmap(-1, size)
        else:
            for one, other in combinations(range(tp * pp), 2):
                pair = socket.socketpair()
                self.sockets[one, other], self.sockets[other, one] = pair

    def run(self, body: Body, *absent: int) -> list[int]:
        """What body returns on each rank, all ranks but the absent at the same time."""
        self.start(body, *absent)
        return self.join()

    def start(self, body: Body, *absent: int) -> None:
        self.processes = []
        self.results = shared(self.tp * self.pp, np.int32)
        for rank in range(self.tp * self.pp):
            if rank in absent:
                continue
            process = os.fork()
            if process == 0:
                self._work(rank, body)
            self.processes.append(process)
        for connection in self.sockets.values():
            connection.close()

    def join(self) -> list[int]:
        deadline = time.monotonic() + PATIENCE_S
        statuses = []
        for process in self.processes:
            while (ended := os.waitpid(process, os.WNOHANG)) == (0, 0):
                if time.monotonic() > deadline:
                    os.kill(process, signal.SIGKILL)
                time.sleep(0.001)
            statuses.append(ended[1])
        assert not any(statuses), f"ranks ended with statuses {statuses}"
        return self.results.tolist()

    def _work(self, rank: int, body: Body) -> None:
        try:
            world = range(self.tp * self.pp)
            for (own, _), connection in self.sockets.items():
                if own != rank:
                    connection.close()
            config = RanksConfig(rank=rank, tp=self.tp, pp=self.pp)
            config.timeout_ms = round(1000 * self.timeout_s)
            config.token_firsts = (ctypes.c_int32 * (self.tp + 1))(*self.token_firsts)
            if self.memory is not None:
                address = ctypes.addressof(ctypes.c_char.from_buffer(self.memory))
                config.memory, config.memory_bytes = address, len(self.memory)
            else:
                numbers = [self.sockets[rank, r].fileno() if r != rank else -1 for r in world]
                config.sockets = (ctypes.c_int32 * len(world))(*numbers)
            self.results[rank] = body(np.frombuffer(config, np.uint8), rank)
            os._exit(0)
        finally:
            os._exit(1)


def shared(shape: int | tuple[int, ...], dtype: type) -> NDArray:
    """Zeros that this process and those it forks all see."""
    count = int(np.prod(shape))
    memory = mmap.mmap(-1, max(1, count * np.dtype(dtype).itemsize))
    return np.frombuffer(memory, dtype, count).reshape(shape)
