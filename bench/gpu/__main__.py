"""Checks and times the GPU kernels: python -m bench.gpu [--json FILE].

Needs a GPU, its driver, cuda-python, Triton and torch; no TensorRT.
"""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

import click

from bench import report
from bench.gpu.device import Gpu
from llmbuild.builder.targets.gpu.capabilities import capability
from llmbuild.builder.targets.gpu.compiled_kernel import CompiledKernel
from llmbuild.builder.targets.gpu.kernels import Request, compile_kernels, usable
from llmbuild.builder.targets.gpu.triton_compiler import require_triton
from llmbuild.errors import InternalError, UserError

if TYPE_CHECKING:  # needs torch and Triton, and the messages before come without
    from bench.gpu.case import Case
    from bench.gpu.measure import Timing

HEADERS = (
    *("kernel", "what", "rows", "context", "us", "GB/s", "of copy"),
    *("torch us", "torch / ours", "result"),
)
JSON_PATH = Path("gpu-kernels.json")
_DIGITS = 6  # of batches and contexts


@dataclass(frozen=True)
class GpuReport:
    """versions: of Triton and torch. copy_bytes_per_s: before and after the kernels."""

    gpu: str
    sm: int
    date: str
    versions: dict[str, str]
    copy_bytes_per_s: tuple[float, float]
    checked: int
    timings: "list[Timing]"


def compiled(cases: "Sequence[Case]", sm: int) -> dict[str, CompiledKernel]:
    """The kernels of the cases, by name."""
    from bench.gpu.cases import variants_of

    requests = [Request(variant, sm) for variant in variants_of(cases)]
    label = f"compiling {len(requests)} kernels for SM {sm}"
    with click.progressbar(length=len(requests), label=label, file=sys.stderr) as bar:
        outcomes = compile_kernels(requests, on_done=lambda _: bar.update(1))
    return {request.variant.name: kernel for request, kernel in usable(outcomes)}


def chosen(cases: "Sequence[Case]", only: str) -> "list[Case]":
    found = [case for case in cases if only in case.name]
    if not found:
        raise UserError(f"no case has {only!r} in its name, such as {cases[0].name!r}")
    return found


def measure(
    gpu: Gpu, checks: "Sequence[Case]", timed: "Sequence[Case]", tell: Callable[[str], None]
) -> GpuReport:
    """Raises InternalError where a kernel's result isn't torch's."""
    from bench.gpu.measure import Bench, copy_bytes_per_s

    bench = Bench(gpu, compiled([*checks, *timed], gpu.sm))
    problems = [f"{case.name}: {found}" for case in checks if (found := bench.check(case))]
    if problems:
        raise InternalError("kernels give wrong results:\n" + "\n".join(problems))
    tell(f"{len(checks)} results are torch's")
    before = copy_bytes_per_s(gpu)
    timings = []
    for number, case in enumerate(timed, 1):
        tell(f"{number} of {len(timed)}: {case.name}")
        timings.append(bench.time(case))
    return GpuReport(
        gpu=gpu.name,
        sm=gpu.sm,
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        versions=_versions(),
        copy_bytes_per_s=(before, copy_bytes_per_s(gpu)),
        checked=len(checks),
        timings=timings,
    )


def table(result: GpuReport) -> str:
    return report.table(HEADERS, [_line(t, max(result.copy_bytes_per_s)) for t in result.timings])


def summary(result: GpuReport) -> str:
    before, after = (each / 1e9 for each in result.copy_bytes_per_s)
    versions = ", ".join(f"{name} {version}" for name, version in result.versions.items())
    return (
        f"{result.gpu} (SM {result.sm}), {versions}\n"
        f"copy: {before:.0f} GB/s before, {after:.0f} GB/s after\n"
    )


def _line(timing: "Timing", copy: float) -> list[str]:
    seconds, theirs, speed = timing.seconds, timing.torch_seconds, timing.bytes_per_s
    ratio = None if seconds is None or theirs is None else theirs / seconds
    result = "no memory" if seconds is None else timing.problem or ("right" if theirs else "-")
    return [
        timing.kernel,
        timing.what,
        str(timing.rows),
        str(timing.context or "-"),
        report.figure(None if seconds is None else seconds * 1e6),
        report.figure(None if speed is None else speed / 1e9),
        "-" if speed is None else report.percent(speed / copy),
        report.figure(None if theirs is None else theirs * 1e6),
        report.figure(ratio),
        result,
    ]


def _versions() -> dict[str, str]:
    import torch
    import triton

    return {"Triton": triton.__version__, "torch": str(torch.__version__)}


def _numbers(ctx: click.Context, param: click.Parameter, value: str) -> tuple[int, ...]:
    parts = [part.strip() for part in value.split(",")]
    is_number = [part.isascii() and part.isdecimal() and len(part) <= _DIGITS for part in parts]
    if not all(is_number) or 0 in map(int, parts):
        raise click.BadParameter(
            f"{value!r} isn't numbers of at most {_DIGITS} digits, not 0, with commas between, "
            "such as 1,16"
        )
    return tuple(map(int, parts))


@click.command()
@click.option("--only", default="", metavar="TEXT", help="Cases whose name has TEXT in it.")
@click.option("--batches", default="1,2,4,8,16,32,64", callback=_numbers, show_default=True)
@click.option("--contexts", default="1024,4096,8192,32768", callback=_numbers, show_default=True)
@click.option(
    "--json",
    "json_path",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help=f"Where results go, {JSON_PATH} by default.",
)
@click.option("--compile-only", "sm", type=int, metavar="SM", help="Compile, without a GPU.")
def main(
    only: str,
    batches: tuple[int, ...],
    contexts: tuple[int, ...],
    json_path: Path | None,
    sm: int | None,
) -> None:
    """Check every kernel against torch and time it, beside a copy's bandwidth and torch."""
    if sm is not None and json_path is not None:
        raise UserError("--compile-only measures nothing: leave --json out")
    json_path = json_path or JSON_PATH
    report.check_output(json_path)
    if sm is not None:
        capability(sm)  # refuses what isn't known
    gpu = Gpu() if sm is None else None
    require_triton()
    try:
        from bench.gpu.cases import check_cases, timed_cases
    except ModuleNotFoundError as error:
        raise UserError(f"{error.name} is missing: pip install -e '.[build,gpu]'") from error
    at, num_sms = (gpu.sm, gpu.num_sms) if gpu else (sm or 0, 1)
    checks = check_cases(at)
    timed = chosen(timed_cases(at, num_sms, batches, contexts), only)
    kernels = {case.kernel for case in timed}
    checks = [case for case in checks if case.kernel in kernels]
    if gpu is None:
        count = len(compiled([*checks, *timed], at))
        click.echo(f"{count} kernels compile for SM {at}: {len(timed)} cases; none was run")
        return
    result = measure(gpu, checks, timed, lambda text: click.echo(text, err=True))
    click.echo(summary(result))
    click.echo(table(result))
    report.write_json(json_path, result)
    click.echo(f"\nWritten to {json_path}")


if __name__ == "__main__":
    report.run(main)
