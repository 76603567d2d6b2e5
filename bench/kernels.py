"""Times every CPU kernel: python -m bench.kernels [SHAPE | ENGINE_DIR] [--json F] [--plot F]."""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import click
import numpy as np
from numpy.typing import NDArray

from bench import machine, native, report, roofline
from bench.cases import SHAPES, Case, Shape, cases, shape_of
from bench.machine import Machine
from bench.roofline import Point, Work
from bench.timing import median_seconds
from llmbuild.builder.targets.cpu import toolchain
from llmbuild.errors import UserError
from llmbuild.runtime.manifest import read_manifest
from llmbuild.runtime.threads import choose_num_threads

COLD_BYTES = 256 << 20  # what calls go round, each in its own copy: more than caches hold
SECTION_PADDING = 4096 + 192  # keeps the sections of activations out of each other's cache sets
HEADERS = ("kernel", "what", "rows", "us", "GB/s", "Gop/s", "bound us", "bound by", "reached")


class Setup(ctypes.Structure):
    """Setup of kernels.cpp, field for field."""

    _fields_ = (
        ("cold", ctypes.c_void_p),
        ("copy_bytes", ctypes.c_int64),
        ("copies", ctypes.c_int64),
        ("warm", ctypes.c_void_p),
        ("section_bytes", ctypes.c_int64),
        *((n, ctypes.c_int) for n in ("threads", "sequences", "new_tokens", "context")),
        ("block_size", ctypes.c_int),
    )


@dataclass(frozen=True)
class Timing:
    """One kernel's result."""

    kernel: str
    what: str
    rows: int
    work: Work
    seconds: float


@dataclass(frozen=True)
class KernelReport:
    shape: Shape
    before: Machine
    after: Machine
    timings: list[Timing]


def measure(shape: Shape, threads: int) -> KernelReport:
    """Every case of the shape, between two measurements of the machine."""
    chosen = list(cases(shape))
    names = {code: f"case_{i}" for i, code in enumerate(dict.fromkeys(c.code for c in chosen))}
    library = native.load(_source(names))
    before = machine.measure(threads)
    bench = _Bench(library, shape.block_size, threads, chosen)
    timings = [bench.run(case, names[case.code]) for case in chosen]
    return KernelReport(shape, before, machine.measure(threads), timings)


def _source(names: dict[str, str]) -> str:
    """C++ with one exported function for each call."""
    (folder,) = toolchain.include_dirs()
    common = folder / "common"
    headers = sorted(p.relative_to(folder) for p in folder.glob("*/*.h") if p.parent != common)
    includes = [f'#include "{header}"' for header in headers]
    functions = [f"LLMBUILD_BENCH({name}, {code})" for code, name in names.items()]
    return "\n".join([*includes, (native.FOLDER / "kernels.cpp").read_text(), *functions])


class _Bench:
    """The memory that cases run on."""

    def __init__(
        self, library: ctypes.CDLL, block_size: int, threads: int, chosen: Sequence[Case]
    ) -> None:
        self.library = library
        self.block_size = block_size
        self.threads = threads
        warm_bytes = max(case.work.warm_bytes for case in chosen)
        self.section_bytes = -(-warm_bytes // 4096) * 4096 + SECTION_PADDING
        self.warm = native.filled(4 * self.section_bytes)
        largest = max(_aligned(case.copy_bytes) for case in chosen)
        self.cold = _line_aligned(native.filled(max(COLD_BYTES, largest) + 64))
        self.calls_done = 0

    def run(self, case: Case, name: str) -> Timing:
        copy_bytes = _aligned(case.copy_bytes)
        setup = Setup(
            cold=self.cold.ctypes.data,
            copy_bytes=copy_bytes,
            copies=max(1, len(self.cold) // copy_bytes) if copy_bytes else 1,
            warm=self.warm.ctypes.data,
            section_bytes=self.section_bytes,
            threads=self.threads,
            sequences=case.batch.sequences,
            new_tokens=case.batch.new_tokens,
            context=case.batch.context,
            block_size=self.block_size,
        )
        types = (ctypes.POINTER(Setup), ctypes.c_int64, ctypes.c_int64)
        function = native.timed_function(self.library, name, *types)

        def sample(calls: int) -> float:
            first, self.calls_done = self.calls_done, self.calls_done + calls + 1
            return function(setup, first, calls)

        seconds = median_seconds(sample)
        return Timing(case.kernel, case.what, case.batch.rows, case.work, seconds)


def _aligned(size_bytes: int) -> int:
    return -(-size_bytes // 64) * 64


def _line_aligned(memory: NDArray[np.uint8]) -> NDArray[np.uint8]:
    return memory[-memory.ctypes.data % 64 :][: len(memory) - 64]


def table(result: KernelReport) -> str:
    """One line for each kernel on each batch."""
    roofs = machine.best_roofs(result.before, result.after)
    lines = []
    for timing in result.timings:
        work, seconds = timing.work, timing.seconds
        size = work.cold_bytes + work.warm_bytes
        numbers = (seconds * 1e6, size / seconds / 1e9, work.all_operations / seconds / 1e9)
        lines.append(
            [
                *(timing.kernel, timing.what, str(timing.rows)),
                *map(report.figure, (*numbers, roofs.bound_s(work) * 1e6)),
                *(roofs.bound_by(work), report.percent(roofs.fraction(work, seconds))),
            ]
        )
    return report.table(HEADERS, lines)


def plot(result: KernelReport, path: Path) -> None:
    """The roofline plot of the kernels that compute something."""
    points = [Point(t.kernel, t.work, t.seconds) for t in result.timings if t.work.all_operations]
    peaks = {
        name: peak
        for name, peak in result.before.operations_per_s.items()
        if name != "fp32" and peak is not None
    }
    roofs = machine.best_roofs(result.before, result.after)
    title = f"{result.shape.name}: {result.before.cpu}, {result.before.threads} threads"
    roofline.plot(path, title, roofs, peaks, points)


def _find_shape(model: str) -> Shape:
    if model in SHAPES:
        return SHAPES[model]
    if not Path(model).is_dir():
        raise UserError(f"{model!r} is neither an engine's directory nor of {', '.join(SHAPES)}")
    return shape_of(read_manifest(Path(model)))


@click.command()
@click.argument("model", default="smollm2-135m")
@click.option("--threads", type=int, help="By default all processors of this process.")
@click.option("--json", "json_path", type=click.Path(path_type=Path), metavar="FILE")
@click.option("--plot", "plot_path", type=click.Path(path_type=Path), metavar="FILE.svg")
def main(model: str, threads: int | None, json_path: Path | None, plot_path: Path | None) -> None:
    """Time, bytes/s and operations/s of every CPU kernel, beside this machine's roofline.

    MODEL is smollm2-135m, llama-1.1b or an engine's directory, for its shapes.
    """
    report.check_output(json_path)
    report.check_output(plot_path)
    if plot_path is not None:
        roofline.check_can_plot()
    result = measure(_find_shape(model), choose_num_threads(threads))
    click.echo(f"Kernels on the shapes of {result.shape.name}\n")
    click.echo(machine.summary(result.before))
    click.echo(table(result))
    click.echo(f"\nAfterwards:\n{machine.summary(result.after)}")
    if json_path is not None:
        report.write_json(json_path, result)
    if plot_path is not None:
        plot(result, plot_path)


if __name__ == "__main__":
    report.run(main)
