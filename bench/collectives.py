"""Times sums over ranks: python -m bench.collectives [--ranks N]... [--threads N] [--json F]."""

import ctypes
import mmap
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

import click
import numpy as np
from numpy.typing import NDArray

from bench import machine, native, report
from bench.machine import Machine
from bench.timing import median_seconds
from llmbuild.errors import InternalError
from llmbuild.runtime.executors.cpu import RanksConfig
from llmbuild.runtime.threads import num_processors

RANKS = (2, 3, 4)
ROWS = (1, 4, 16, 64)
HIDDEN = (576, 1024, 2048, 4096)
CALLS = (200, 2000)  # the fewest and the most that are timed of a case
CALL_BYTES = 1 << 27  # what all of a case's calls sum, between these
TIMEOUT_MS = 30_000
HEADERS = ("ranks", "rows", "hidden", "KiB", "p50 us", "p99 us", "bound us", "reached")


@dataclass(frozen=True)
class Timing:
    """The sum of [rows, hidden] fp32 over ranks."""

    ranks: int
    rows: int
    hidden: int
    p50_s: float
    p99_s: float
    copy_bytes_per_s: float  # read and written, of buffers of this size, before or after

    @property
    def bytes_moved(self) -> int:
        """What a rank has to read and write at least: its part once, to where others see it, and
        then a share of each other's part, its sum, and the others' sums to where it wants them."""
        size = 4 * self.rows * self.hidden
        share = size / self.ranks
        return round(2 * size + (self.ranks - 1) * share + share + 2 * (size - share))

    @property
    def bound_s(self) -> float:
        return self.bytes_moved / self.copy_bytes_per_s


@dataclass(frozen=True)
class CollectivesReport:
    """threads: of each rank."""

    threads: int
    processors: int
    before: Machine
    after: Machine
    timings: list[Timing]


def measure(ranks: Sequence[int], threads: int) -> CollectivesReport:
    """Every size for each number of ranks, between two measurements of the machine."""
    processors = num_processors()
    used = min(processors, max(ranks) * threads)
    before = machine.measure(used)
    cases = [(n, rows, hidden) for n in ranks for rows in ROWS for hidden in HIDDEN]
    timings = [time_all_reduce(*case, threads) for case in cases]
    return CollectivesReport(threads, processors, before, machine.measure(used), timings)


def time_all_reduce(ranks: int, rows: int, hidden: int, threads: int) -> Timing:
    """Every rank is a process; this one is rank 0, whose time counts."""
    library = _library()
    shared_bytes = native.timed_function(library, "shared_bytes", ctypes.c_int, ctypes.c_int64)
    memory = mmap.mmap(-1, int(shared_bytes(ranks, rows * hidden)))
    seconds = np.zeros(min(max(CALL_BYTES // (4 * rows * hidden), CALLS[0]), CALLS[1]))
    run = partial(_run_rank, memory, ranks, rows * hidden, threads, seconds)
    before = _copy_bandwidth(4 * rows * hidden, threads)
    with _other_ranks(ranks, run):
        run(0)
    return Timing(
        ranks=ranks,
        rows=rows,
        hidden=hidden,
        p50_s=float(np.percentile(seconds, 50)),
        p99_s=float(np.percentile(seconds, 99)),
        copy_bytes_per_s=max(before, _copy_bandwidth(4 * rows * hidden, threads)),
    )


@cache
def _library() -> ctypes.CDLL:
    return native.load((native.FOLDER / "collectives.cpp").read_text())


def _run_rank(
    memory: mmap.mmap,
    ranks: int,
    count: int,
    threads: int,
    seconds: NDArray[np.float64],
    rank: int,
) -> None:
    """A rank's part of a case, on processors of its own as far as there are enough."""
    firsts = (ctypes.c_int32 * (ranks + 1))()
    config = RanksConfig(rank=rank, tp=ranks, pp=1, timeout_ms=TIMEOUT_MS, token_firsts=firsts)
    config.memory = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    config.memory_bytes = len(memory)
    pointer, integer = ctypes.c_void_p, ctypes.c_int64
    types = (pointer, ctypes.c_int, pointer, integer, integer, pointer)
    function = native.timed_function(_library(), "all_reduce_seconds", *types)
    x = np.zeros(count, np.float32)
    with _on_processors_of(rank, threads):
        arguments = (x.ctypes.data, count, len(seconds), seconds.ctypes.data)
        if function(ctypes.addressof(config), threads, *arguments) < 0:
            raise InternalError(f"a rank kept rank {rank} waiting for {TIMEOUT_MS} ms")


@contextmanager
def _on_processors_of(rank: int, threads: int) -> Iterator[None]:
    allowed = os.sched_getaffinity(0)
    ordered = sorted(allowed)
    first = rank * threads
    os.sched_setaffinity(0, {ordered[(first + i) % len(ordered)] for i in range(threads)})
    try:
        yield
    finally:
        os.sched_setaffinity(0, allowed)


@contextmanager
def _other_ranks(ranks: int, run: "partial[None]") -> Iterator[None]:
    """A process for each rank but 0."""
    processes = []
    for rank in range(1, ranks):
        process = os.fork()
        if process == 0:
            try:
                run(rank)
                os._exit(0)
            finally:
                os._exit(1)
        processes.append(process)
    try:
        yield
    finally:
        for process in processes:
            os.waitpid(process, 0)


def _copy_bandwidth(size_bytes: int, threads: int) -> float:
    """Bytes read and written a second, where all threads copy a part of so many."""
    types = (ctypes.c_int, ctypes.c_int64, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64)
    copy = native.timed_function(_library(), "copy_seconds", *types)
    to, source = native.filled(size_bytes), native.filled(size_bytes)

    def sample(calls: int) -> float:
        return copy(threads, calls, to.ctypes.data, source.ctypes.data, size_bytes)

    with _on_processors_of(0, threads):
        return 2 * size_bytes / median_seconds(sample)


def table(result: CollectivesReport) -> str:
    """One line for each size."""
    lines = []
    for timing in result.timings:
        sizes = (timing.ranks, timing.rows, timing.hidden)
        numbers = (timing.rows * timing.hidden / 256, timing.p50_s * 1e6, timing.p99_s * 1e6)
        reached = report.percent(timing.bound_s / timing.p50_s)
        figures = map(report.figure, (*numbers, timing.bound_s * 1e6))
        lines.append([*map(str, sizes), *figures, reached])
    return report.table(HEADERS, lines)


def remark(result: CollectivesReport) -> str:
    """Of the ranks that have no processors of their own; empty where all have."""
    crowded = {t.ranks for t in result.timings if t.ranks * result.threads > result.processors}
    if not crowded:
        return ""
    numbers = " and ".join(map(str, sorted(crowded)))
    return (
        f"{numbers} ranks of {result.threads} threads share {result.processors} processors: their "
        "times are the system's turns, and say nothing of machines with enough of them.\n"
    )


@click.command()
@click.option("--ranks", type=click.IntRange(2), multiple=True, default=RANKS, show_default=True)
@click.option("--threads", type=click.IntRange(1), default=1, help="Of each rank.")
@click.option("--json", "json_path", type=click.Path(path_type=Path), metavar="FILE")
def main(ranks: tuple[int, ...], threads: int, json_path: Path | None) -> None:
    """Latency of all_reduce between processes of one machine, beside the copies it has to do."""
    report.check_output(json_path)
    result = measure(ranks, threads)
    click.echo(machine.summary(result.before))
    click.echo(table(result))
    click.echo(f"\n{remark(result)}\nAfterwards:\n{machine.summary(result.after)}")
    if json_path is not None:
        report.write_json(json_path, result)


if __name__ == "__main__":
    report.run(main)
