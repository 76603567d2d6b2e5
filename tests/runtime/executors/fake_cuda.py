"""A GPU that isn't there: stands for cuda.bindings.runtime, holds its callers to CUDA's rules, and
does a stream's work when it is waited for, not before."""

import ctypes
from collections import Counter
from collections.abc import Callable
from enum import IntEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

Work = Callable[[], None]
STREAM = 77
FIRST_ADDRESS = 1 << 44  # far from the host's memory
GAP_BYTES = 4096  # between allocations, so that no address past one is in the next


class Status(IntEnum):
    cudaSuccess = 0
    cudaErrorInvalidValue = 1
    cudaErrorMemoryAllocation = 2
    cudaErrorIllegalAddress = 700


class CopyKind(IntEnum):
    cudaMemcpyHostToDevice = 1
    cudaMemcpyDeviceToHost = 2


class CaptureMode(IntEnum):
    cudaStreamCaptureModeGlobal = 0
    cudaStreamCaptureModeThreadLocal = 1


class FakeCuda:
    """size_bytes: of the GPU's memory. failing: calls, by name, and the status that they give.
    is_lost: as after an illegal access, when every call fails. number, count: which GPU it is, of
    how many."""

    cudaError_t = Status
    cudaMemcpyKind = CopyKind
    cudaStreamCaptureMode = CaptureMode
    cudaStreamNonBlocking = 1

    def __init__(self, size_bytes: int = 1 << 30, number: int = 0, count: int = 1) -> None:
        self.size_bytes, self.number, self.count = size_bytes, number, count
        self.failing: dict[str, Status] = {}
        self.is_lost = False
        self.calls: Counter[str] = Counter()
        self.device: dict[int, NDArray[np.uint8]] = {}
        self.host: dict[int, Any] = {}
        self.streams = 0
        self.graphs: dict[int, list[Work]] = {}  # that can be launched
        self.recording: list[Work] | None = None
        self._queue: list[Work] = []
        self._next = FIRST_ADDRESS
        self._numbers = iter(range(1000, 10_000))

    def __getattribute__(self, name: str) -> Any:
        """Counts CUDA's calls, and lets some fail."""
        found = super().__getattribute__(name)
        if not name.startswith("cuda") or not callable(found) or isinstance(found, type):
            return found
        if name.startswith("cudaGetError"):
            return found

        def call(*arguments: Any) -> tuple[Any, ...]:
            self.calls[name] += 1
            if self.is_lost:
                return Status.cudaErrorIllegalAddress, None
            if name in self.failing:
                return self.failing[name], None
            result = found(*arguments)
            if isinstance(result, Status):
                return (result, None)
            return (Status.cudaSuccess,) if result is None else (Status.cudaSuccess, result)

        return call

    @property
    def is_empty(self) -> bool:
        """All that was taken has been given back."""
        return not (self.device or self.host or self.graphs or self.streams)

    @property
    def used_bytes(self) -> int:
        return sum(memory.size for memory in self.device.values())

    def view(self, address: int, size: int) -> NDArray[np.uint8]:
        """The GPU's memory, which must be within one allocation."""
        for base, memory in self.device.items():
            if base <= address and address + size <= base + memory.size:
                return memory[address - base : address - base + size]
        raise AssertionError(f"{size} bytes at {address:#x} aren't the GPU's")

    def submit(self, work: Work) -> None:
        (self._queue if self.recording is None else self.recording).append(work)

    # The calls. What they give beside the status; a Status is a failure.

    def cudaGetErrorName(self, status: Status) -> tuple[Status, bytes]:
        return Status.cudaSuccess, status.name.encode()

    def cudaGetErrorString(self, status: Status) -> tuple[Status, bytes]:
        return Status.cudaSuccess, b"a text"

    def cudaGetDeviceCount(self) -> int:
        return self.count

    def cudaSetDevice(self, device: int) -> None:
        assert device == self.number

    def cudaMemGetInfo(self) -> Any:
        self._may_wait()
        return _Two(self.size_bytes - self.used_bytes, self.size_bytes)

    def cudaMalloc(self, size: int) -> Any:
        self._may_wait()
        if self.used_bytes + size > self.size_bytes:
            return Status.cudaErrorMemoryAllocation
        address = self._next
        self._next += -(-size // 256) * 256 + GAP_BYTES
        self.device[address] = np.full(size, 0xFF, np.uint8)  # no number, in fp16 and bf16
        return address

    def cudaFree(self, address: int) -> None:
        self._may_wait()
        assert not self._queue, "memory is given back that may be in use"
        del self.device[address]

    def cudaMallocHost(self, size: int) -> int:
        self._may_wait()
        memory = (ctypes.c_uint8 * size)()
        self.host[ctypes.addressof(memory)] = memory
        return ctypes.addressof(memory)

    def cudaFreeHost(self, address: int) -> None:
        del self.host[address]

    def cudaStreamCreateWithFlags(self, flags: int) -> int:
        assert flags == self.cudaStreamNonBlocking
        self.streams += 1
        return STREAM

    def cudaStreamDestroy(self, stream: int) -> None:
        assert stream == STREAM
        self.streams -= 1

    def cudaStreamSynchronize(self, stream: int) -> None:
        assert stream == STREAM
        self._may_wait()
        while self._queue:
            self._queue.pop(0)()

    def cudaMemsetAsync(self, address: int, value: int, size: int, stream: int) -> None:
        assert stream == STREAM
        target = self.view(address, size)
        self.submit(lambda: target.fill(value))

    def cudaMemcpyAsync(
        self, target: int, source: int, size: int, kind: CopyKind, stream: int
    ) -> None:
        assert stream == STREAM
        is_in = kind == CopyKind.cudaMemcpyHostToDevice
        device = self.view(target if is_in else source, size)
        host = self._pinned(source if is_in else target, size)
        to, of = (device, host) if is_in else (host, device)
        self.submit(lambda: np.copyto(to, of))

    def cudaStreamBeginCapture(self, stream: int, mode: CaptureMode) -> None:
        assert stream == STREAM
        assert mode == CaptureMode.cudaStreamCaptureModeThreadLocal
        assert self.recording is None
        self.recording = []

    def cudaStreamEndCapture(self, stream: int) -> int:
        assert self.recording is not None
        recorded, self.recording = self.recording, None
        number = next(self._numbers)
        self.graphs[number] = recorded
        return number

    def cudaGraphInstantiate(self, recorded: int, flags: int) -> int:
        number = next(self._numbers)
        self.graphs[number] = list(self.graphs[recorded])
        return number

    def cudaGraphDestroy(self, recorded: int) -> None:
        del self.graphs[recorded]

    def cudaGraphExecDestroy(self, graph: int) -> None:
        del self.graphs[graph]

    def cudaGraphLaunch(self, graph: int, stream: int) -> None:
        assert self.recording is None
        self._queue += self.graphs[graph]

    def _may_wait(self) -> None:
        assert self.recording is None, (
            "no memory is taken and nothing is waited for while recording"
        )

    def _pinned(self, address: int, size: int) -> NDArray[np.uint8]:
        for base, memory in self.host.items():
            if base <= address and address + size <= base + len(memory):
                return np.ctypeslib.as_array(memory)[address - base : address - base + size]
        raise AssertionError("the host's memory isn't pinned")


class _Two(tuple[int, int]):
    """Two results of one call."""

    def __new__(cls, first: int, second: int) -> "_Two":
        return super().__new__(cls, (first, second))
