"""Checks and times cases on a GPU."""

import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod

import torch

from bench.gpu.arguments import Packed
from bench.gpu.case import Case, Results, wrong
from bench.gpu.device import Gpu
from llmbuild.builder.targets.gpu.compiled_kernel import CompiledKernel

REPEATS = 9  # whose median counts
COLD_BYTES = 512 << 20  # gone round, in copies of a case's data: more than an L2 holds
MAX_COPIES = 64
COPY_BYTES = 1 << 30  # of the copy that tells the bandwidth
USED_MEMORY = 0.8  # of what is free


@dataclass(frozen=True)
class Timing:
    """seconds: the median; None where there wasn't memory enough. torch_seconds: None without
    torch's CUDA. problem: how the result differs from torch's."""

    kernel: str
    what: str
    rows: int
    context: int
    moved_bytes: int
    seconds: float | None
    torch_seconds: float | None = None
    problem: str = ""

    @property
    def bytes_per_s(self) -> float | None:
        return None if self.seconds is None else self.moved_bytes / self.seconds


def copy_bytes_per_s(gpu: Gpu) -> float:
    """Read and written, by a copy of the driver's from one part of memory to another."""
    size = min(COPY_BYTES, gpu.free_bytes() // 4)
    source, target = gpu.allocate(size), gpu.allocate(size)
    try:
        gpu.fill(source, size, bytes(1 << 20))
        seconds = gpu.time(lambda: gpu.copy(target, source, size), REPEATS)
        return 2 * size / statistics.median(seconds)
    finally:
        gpu.free(source)
        gpu.free(target)


class Bench:
    """kernels: by their variants' names."""

    def __init__(self, gpu: Gpu, kernels: Mapping[str, CompiledKernel]) -> None:
        self._gpu = gpu
        self._kernels = {name: (kernel, gpu.load(kernel)) for name, kernel in kernels.items()}

    def check(self, case: Case) -> str:
        """How the kernels' result differs from torch's on the CPU, or nothing."""
        with _Copy(self._gpu, case) as copy:
            self._enqueue(case, copy)
            self._gpu.synchronise()
            tensors = {name: buffer.host() for name, buffer in case.buffers.items()}
            return wrong(copy.results(), case.competitor(tensors)(), case.tolerance)

    def time(self, case: Case) -> Timing:
        """Of a case's kernels, each time on another copy of its data."""
        count = max(1, min(MAX_COPIES, COLD_BYTES // case.moved_bytes))
        named = (case.kernel, case.what, case.rows, case.context, case.moved_bytes)
        if count * case.size_bytes > USED_MEMORY * self._gpu.free_bytes():
            return Timing(*named, seconds=None)
        copies: list[_Copy] = []
        try:
            copies += [_Copy(self._gpu, case) for _ in range(count)]

            def enqueue() -> None:
                for copy in copies:
                    self._enqueue(case, copy)

            seconds = statistics.median(self._gpu.time(enqueue, REPEATS)) / count
            torch_seconds, problem = self._beside_torch(case, copies)
            return Timing(*named, seconds, torch_seconds, problem)
        finally:
            for copy in copies:
                copy.free()
            if torch.cuda.is_available():
                torch.cuda.empty_cache()

    def _enqueue(self, case: Case, copy: "_Copy") -> None:
        for launch, packed in zip(case.launches, copy.packed, strict=True):
            kernel, function = self._kernels[launch.variant.name]
            self._gpu.launch(function, kernel, launch.grid, packed)

    def _beside_torch(self, case: Case, copies: list["_Copy"]) -> tuple[float | None, str]:
        """Torch's seconds on the same data, and how its result differs."""
        if not torch.cuda.is_available():
            return None, ""
        try:
            functions = [case.competitor(copy.tensors()) for copy in copies]
            theirs = tuple(each.cpu() for each in functions[0]())
            problem = wrong(copies[0].results(), theirs, case.tolerance)
            return _torch_seconds(functions), problem
        except torch.cuda.OutOfMemoryError:
            return None, ""


class _Copy:
    """A case's data on the GPU, and its launches' arguments."""

    def __init__(self, gpu: Gpu, case: Case) -> None:
        self._gpu, self._case = gpu, case
        self._addresses: dict[str, int] = {}
        try:
            for name, buffer in case.buffers.items():
                self._addresses[name] = gpu.allocate(buffer.size_bytes)
                gpu.fill(self._addresses[name], buffer.size_bytes, buffer.pattern)
        except BaseException:
            self.free()
            raise
        self.packed = [
            Packed(
                launch.variant,
                {
                    name: self._addresses[value] if isinstance(value, str) else value
                    for name, value in launch.arguments.items()
                },
            )
            for launch in case.launches
        ]

    def __enter__(self) -> "_Copy":
        return self

    def __exit__(self, *_: object) -> None:
        self.free()

    def free(self) -> None:
        for address in self._addresses.values():
            self._gpu.free(address)
        self._addresses = {}

    def results(self) -> Results:
        return tuple(map(self._result, self._case.results))

    def _result(self, name: str) -> torch.Tensor:
        buffer = self._case.buffers[name]
        content = self._gpu.read(self._addresses[name], buffer.size_bytes)
        flat = torch.frombuffer(bytearray(content), dtype=buffer.values.dtype)
        return flat.reshape(buffer.shape)

    def tensors(self) -> dict[str, torch.Tensor]:
        """The data as torch's own, but for what kernels write."""
        made = {}
        for name, buffer in self._case.buffers.items():
            if name in _read_by_torch(self._case):
                made[name] = torch.empty(buffer.shape, dtype=buffer.values.dtype, device="cuda")
                torch.cuda.synchronize()
                self._gpu.copy(made[name].data_ptr(), self._addresses[name], buffer.size_bytes)
        self._gpu.synchronise()
        return made


def _read_by_torch(case: Case) -> set[str]:
    """Buffers that aren't written: what is empty at first has one value."""
    return {
        name
        for name, buffer in case.buffers.items()
        if buffer.values.numel() > 1 or prod(buffer.shape) == 1
    }


def _torch_seconds(functions: list[Callable[[], Results]]) -> float:
    """Of one of them, recorded as a graph as ours are."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for function in functions[:1] * 3:  # takes workspaces and chooses algorithms
            function()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        kept = [function() for function in functions]
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    seconds = []
    for _ in range(REPEATS + 1):
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        seconds.append(1e-3 * begin.elapsed_time(end))
    del kept
    return statistics.median(seconds[1:]) / len(functions)
