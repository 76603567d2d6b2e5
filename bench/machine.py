"""Measures what this machine reaches: python -m bench.machine [--threads N] [--json FILE]."""

import ctypes
import os
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cache, partial
from pathlib import Path

import click

from bench import native, report
from bench.roofline import Roofs
from bench.timing import median_seconds
from llmbuild.builder.targets.cpu import toolchain
from llmbuild.runtime.isa import CPUINFO
from llmbuild.runtime.threads import choose_num_threads

# The second of them stays in the L3 of most servers, the last in no cache. What of 1 MiB a thread
# reads stays in its L2.
READ_SIZES = {"1 MiB": 1 << 20, "24 MiB": 24 << 20, "80 MiB": 80 << 20, "1 GiB": 1 << 30}
CACHE, MEMORY = "1 MiB", "1 GiB"
PREFETCH_AHEAD = (0, 256, 1024)  # floats; the way of reading that is fastest counts
PEAKS = ("fp32", "bf16", "int8")


@dataclass(frozen=True)
class Machine:
    """One measurement of one machine. Threads are pinned; bandwidths and peaks are of all of them
    together, medians. A peak is None where the processor or the compiler's target has none."""

    cpu: str
    threads: int
    isa_level: str
    compiler: str
    date: str
    load_average: float  # of the minute before
    read_bytes_per_s: dict[str, float]  # by the size of what is read again and again
    operations_per_s: dict[str, float | None]  # fp32 FMA, bf16 dot, int4/int8 dot
    barrier_s: float

    @property
    def roofs(self) -> Roofs:
        """What bounds the kernels of today: they compute in fp32, or multiply bytes."""
        fp32, int8 = self.operations_per_s["fp32"], self.operations_per_s["int8"]
        assert fp32 is not None
        assert int8 is not None
        return Roofs(self.read_bytes_per_s[MEMORY], self.read_bytes_per_s[CACHE], fp32, int8)


def best_roofs(before: Machine, after: Machine) -> Roofs:
    """The higher of two measurements, as a machine's clocks and caches can change in between."""
    a, b = before.roofs, after.roofs
    return Roofs(
        max(a.memory_bytes, b.memory_bytes),
        max(a.cache_bytes, b.cache_bytes),
        max(a.operations, b.operations),
        max(a.int8_operations, b.int8_operations),
    )


def measure(threads: int) -> Machine:
    """Takes a few seconds and 1 GiB of memory."""
    load_average = os.getloadavg()[0]
    (level,) = toolchain.resolve_levels([toolchain.NATIVE])
    return Machine(
        cpu=_cpu_model(),
        threads=threads,
        isa_level=level,
        compiler=toolchain.find_compiler().name,
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        load_average=load_average,
        read_bytes_per_s=_read_bandwidths(threads),
        operations_per_s={name: _peak(name, threads) for name in PEAKS},
        barrier_s=median_seconds(partial(_timed("barrier_seconds"), threads)),
    )


def summary(machine: Machine) -> str:
    """The record for people."""
    reads = [(f"read {size}", value, "GB/s") for size, value in machine.read_bytes_per_s.items()]
    peaks = [(f"{name} peak", value, "Gop/s") for name, value in machine.operations_per_s.items()]
    rows = [
        [what, report.figure(None if value is None else value / 1e9), unit]
        for what, value, unit in (*reads, *peaks)
    ]
    rows.append(["barrier", report.figure(machine.barrier_s * 1e9), "ns"])
    return (
        f"{machine.cpu}, {machine.threads} pinned threads, {machine.isa_level}\n"
        f"{machine.compiler}\n"
        f"{machine.date}, load average before {machine.load_average:.2f}\n\n"
        f"{report.table(('what', 'median', 'unit'), rows)}\n"
    )


@cache
def _library() -> ctypes.CDLL:
    return native.load((native.FOLDER / "machine.cpp").read_text())


def _timed(name: str, *types: type) -> Callable[..., float]:
    return native.timed_function(_library(), name, ctypes.c_int, ctypes.c_int64, *types)


def _read_bandwidths(threads: int) -> dict[str, float]:
    types = (ctypes.c_void_p, ctypes.c_int64, ctypes.c_int, ctypes.c_int64)
    read = _timed("read_seconds", *types)
    buffer = native.filled(max(READ_SIZES.values()))
    bandwidths = {}
    for name, size in READ_SIZES.items():
        passes = max(1, (8 << 20) // size)  # so that barriers don't show

        def sample(calls: int, ahead: int, size: int = size, passes: int = passes) -> float:
            return read(threads, calls, buffer.ctypes.data, size, passes, ahead)

        fastest = min(median_seconds(partial(sample, ahead=ahead)) for ahead in PREFETCH_AHEAD)
        bandwidths[name] = size * passes / fastest
    return bandwidths


def _peak(name: str, threads: int) -> float | None:
    count = _library()[f"{name}_operations"]
    count.restype = ctypes.c_int64
    operations = int(count())
    if operations == 0:
        return None
    return threads * operations / median_seconds(partial(_timed(f"{name}_seconds"), threads))


def _cpu_model() -> str:
    lines = (line.partition(":") for line in CPUINFO.read_text().splitlines())
    return next((value.strip() for key, _, value in lines if key.strip() == "model name"), "?")


@click.command()
@click.option("--threads", type=int, help="By default all processors of this process.")
@click.option("--json", "json_path", type=click.Path(path_type=Path), metavar="FILE")
def main(threads: int | None, json_path: Path | None) -> None:
    """Read bandwidth, multiply peaks and barrier time of this machine."""
    report.check_output(json_path)
    machine = measure(choose_num_threads(threads))
    click.echo(summary(machine))
    if json_path is not None:
        report.write_json(json_path, machine)


if __name__ == "__main__":
    report.run(main)
