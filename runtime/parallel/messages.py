"""What ranks say to each other beside their sums: messages over a stream socket."""

import socket
import struct
import time
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from itertools import accumulate, pairwise

from llmbuild.runtime.batch import ARRAYS, Int32s, StepBatch, as_tables

MAX_BYTES = 1 << 30  # of a message; more is not one of ours

_HEADER = struct.Struct("<iI")  # kind, bytes that follow
_SIZES = 4  # of a part: tokens, sequences, logit rows, blocks of a sequence
_INT_BYTES = 4


class Kind(IntEnum):
    """What rank 0 says, and what the others answer."""

    SETUP = 1  # the engine, to a process that rank 0 has started
    HELLO = 2  # who a process is that somebody else has started
    TABLE = 3  # where all the ranks are
    REFUSED = 4  # why it can't go on, as text
    READY = 5
    STEP = 6
    PING = 7
    PONG = 8
    FAILED = 9  # the step went wrong; with the rank that it waited for
    CLOSE = 10
    JOIN = 11  # all ranks have what they need, and may meet
    RESULT = 12  # of a step, where native code doesn't bring it together


class Channel:
    """Messages to and from one other process; for one thread at a time.

    Raises ConnectionError when the other end is gone, TimeoutError when it keeps silent.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection

    def fileno(self) -> int:
        return self._connection.fileno()

    def send(self, kind: Kind, payload: bytes = b"", timeout_s: float | None = None) -> None:
        """timeout_s: how long the other may take to make room for it."""
        self._connection.settimeout(timeout_s)
        self._connection.sendall(_HEADER.pack(kind, len(payload)) + payload)

    def receive(
        self, timeout_s: float | None = None, max_bytes: int = MAX_BYTES
    ) -> tuple[Kind, bytearray]:
        """The next message; timeout_s: how long to wait for the whole of it."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        kind, size = _HEADER.unpack(self._read(_HEADER.size, deadline))
        if kind not in {*Kind} or size > max_bytes:
            raise ConnectionError("what came is no message of llmbuild's")
        return Kind(kind), self._read(size, deadline)

    def close(self) -> None:
        self._connection.close()

    def _read(self, count: int, deadline: float | None) -> bytearray:
        data = bytearray(count)
        left = memoryview(data)
        while left:
            wait_s = None if deadline is None else deadline - time.monotonic()
            if wait_s is not None and wait_s <= 0:
                raise TimeoutError("the other process keeps silent")
            self._connection.settimeout(wait_s)
            got = self._connection.recv_into(left)
            if got == 0:
                raise ConnectionResetError("the other process is gone")
            left = left[got:]
        return data


@dataclass(frozen=True)
class StepMessage:
    """A step, or num_steps greedy ones; 0 asks for logits. arrays: the parts' StepBatch.data, one
    after the other. sizes: [parts, 4] of them."""

    num_steps: int
    sizes: "array[int]"
    arrays: "array[int]"

    @staticmethod
    def of(parts: Sequence[StepBatch], num_steps: int) -> "StepMessage":
        sizes, arrays = array("i"), array("i")
        for part in parts:
            sizes.extend((part.num_tokens, part.num_sequences))
            sizes.extend((part.num_logit_rows, part.blocks_per_sequence))
            arrays += part.data
        return StepMessage(num_steps, sizes, arrays)

    def batches(self) -> list[StepBatch]:
        """The parts."""
        made, begin = [], 0
        for first in range(0, len(self.sizes), _SIZES):
            tokens, sequences, rows, width = self.sizes[first : first + _SIZES]
            lengths = (tokens, tokens, sequences + 1, sequences, sequences * width, rows)
            ends = [*accumulate(lengths, initial=begin)]
            each = [self.arrays[start:end] for start, end in pairwise(ends)]
            numbers: dict[str, Int32s] = dict(zip(ARRAYS, each, strict=True))
            numbers["block_tables"] = as_tables(numbers["block_tables"].tobytes(), width)
            made.append(StepBatch(**numbers))
            begin = ends[-1]
        return made

    def encode(self) -> bytes:
        head = array("i", [self.num_steps, len(self.sizes) // _SIZES])
        return b"".join((head.tobytes(), self.sizes.tobytes(), self.arrays.tobytes()))

    @staticmethod
    def decode(payload: bytearray) -> "StepMessage":
        numbers = array("i")
        numbers.frombytes(payload)
        end = 2 + _SIZES * numbers[1]
        return StepMessage(numbers[0], numbers[2:end], numbers[end:])
