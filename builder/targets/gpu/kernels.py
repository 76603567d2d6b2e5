"""Compiles many kernels for many SMs: a process each, the results kept in the cache.

A process of its own keeps a kernel that crashes the compiler from taking others with it, and
lets all of them start from the same state. The processes are forks, which have Triton loaded;
nothing is compiled in this one. What is done when a run is stopped need not be done again.
"""

import multiprocessing
import os
import shutil
import signal
import tempfile
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path

from llmbuild.builder.targets.gpu.capabilities import capability
from llmbuild.builder.targets.gpu.compiled_kernel import CompiledKernel, decode, encode
from llmbuild.builder.targets.gpu.gates import broken_gates
from llmbuild.builder.targets.gpu.triton_compiler import (
    cache_key,
    check_variant,
    compile_variant,
    load_compiler,
    require_triton,
)
from llmbuild.cache import cache_root
from llmbuild.errors import BuildError, InternalError
from llmbuild.plugins.common.kernel_variant import KernelVariant

_LOG, _PROBLEM = "log", "problem"  # files of a compile's scratch folder


@dataclass(frozen=True)
class Request:
    variant: KernelVariant
    sm: int


Compiled = tuple[Request, CompiledKernel]


@dataclass(frozen=True)
class Outcome:
    """A kernel, or why there is none, or why it can't be used."""

    request: Request
    kernel: CompiledKernel | None
    problem: str  # empty where there is none
    cached: bool


def registered_kernels(sms: Iterable[int]) -> list[Request]:
    """Every kernel of the plugins for every given SM. Raises BuildError without Triton, or for an
    unknown SM."""
    require_triton()
    from llmbuild.plugins.kernel_registry import variants

    requests = []
    for sm in sms:
        capability(sm)
        requests += [Request(variant, sm) for variant in variants(sm)]
    check_names(requests)
    return requests


def check_names(requests: Iterable[Request]) -> None:
    """Raises InternalError when two kernels of an SM have one name."""
    count = Counter((request.sm, request.variant.name) for request in requests)
    if twice := sorted({name for (_, name), times in count.items() if times > 1}):
        raise InternalError(f"more than one kernel is called {', '.join(twice)}")


def compile_kernels(
    requests: Sequence[Request],
    jobs: int | None = None,
    on_done: Callable[[Outcome], None] = lambda _: None,
) -> list[Outcome]:
    """Compiles what the cache lacks, `jobs` at a time (as many as there are processors). Outcomes
    come in the requests' order, and `on_done` gets each as soon as it is there."""
    require_triton()
    outcomes: dict[int, Outcome] = {}
    missing: dict[Path, list[int]] = {}  # requests by the entry that the cache lacks
    for index, request in enumerate(requests):
        try:
            entry = _entry(request)
        except Exception as error:  # of Triton, which reads the source for the cache's key
            outcomes[index] = _outcome(request, _text(error))
        else:
            if (kernel := _load(entry)) is None:
                missing.setdefault(entry, []).append(index)
                continue
            outcomes[index] = _outcome(request, kernel, cached=True)
        on_done(outcomes[index])
    firsts = {entry: requests[indices[0]] for entry, indices in missing.items()}
    for entry, result in _compile(firsts, jobs or len(os.sched_getaffinity(0))):
        for index in missing[entry]:
            outcomes[index] = _outcome(requests[index], result)
            on_done(outcomes[index])
    return [outcomes[index] for index in range(len(requests))]


def usable(outcomes: Iterable[Outcome]) -> list[Compiled]:
    """Every kernel. Raises BuildError with the problems of all that have one."""
    outcomes = list(outcomes)
    if problems := [outcome.problem for outcome in outcomes if outcome.problem]:
        raise BuildError("\n".join(problems))
    return [(outcome.request, outcome.kernel) for outcome in outcomes if outcome.kernel]


def _compile(
    requests: Mapping[Path, Request], jobs: int
) -> Iterator[tuple[Path, CompiledKernel | str]]:
    """For each cache entry, as it comes: the kernel, or why there is none."""
    if not requests:
        return
    load_compiler()
    fork = multiprocessing.get_context("fork")
    waiting = list(requests)[::-1]
    running: dict[int, tuple[Path, Path, BaseProcess]] = {}  # by what tells its end
    with tempfile.TemporaryDirectory(prefix="llmbuild-kernels-") as scratch:
        try:
            while waiting or running:
                while waiting and len(running) < jobs:
                    entry = waiting.pop()
                    folder = Path(scratch, entry.name)
                    folder.mkdir()
                    arguments = (requests[entry], entry, folder)
                    started = fork.Process(target=_compile_one, args=arguments)
                    started.start()
                    running[started.sentinel] = (entry, folder, started)
                for sentinel in wait(list(running)):
                    assert isinstance(sentinel, int)
                    entry, folder, process = running.pop(sentinel)
                    process.join()
                    yield entry, _load(entry) or _reason(folder, process)
                    shutil.rmtree(folder)
        finally:
            for _, _, process in running.values():
                process.kill()
                process.join()


def _compile_one(request: Request, entry: Path, folder: Path) -> None:
    """What a fork does: leaves a cache entry, or the reason for none."""
    log = os.open(folder / _LOG, os.O_WRONLY | os.O_CREAT)
    os.dup2(log, 1)
    os.dup2(log, 2)
    try:
        _store(entry, compile_variant(request.variant, request.sm, folder))
    except Exception as error:
        (folder / _PROBLEM).write_text(_text(error))


def _reason(folder: Path, process: BaseProcess) -> str:
    """Why a fork has left no cache entry."""
    if (folder / _PROBLEM).exists():
        return (folder / _PROBLEM).read_text()
    code = process.exitcode or 0
    end = signal.Signals(-code).name if code < 0 else f"status {code}"
    printed = (folder / _LOG).read_text(errors="replace").strip().splitlines()
    return "\n".join([f"the compiler ended with {end}", *printed[-5:]])


def _outcome(request: Request, result: CompiledKernel | str, cached: bool = False) -> Outcome:
    """Of a kernel, held to the gates, or of the reason why there is none."""
    name = f"kernel {request.variant.name} for SM {request.sm}"
    if isinstance(result, str):
        return Outcome(request, None, f"{name} doesn't compile: {result}", cached)
    broken = broken_gates(request.sm, result)
    return Outcome(request, result, f"{name} {'; '.join(broken)}" if broken else "", cached)


def _text(error: Exception) -> str:
    return "".join(traceback.format_exception_only(error)).strip()


def _entry(request: Request) -> Path:
    check_variant(request.variant)
    return cache_root() / "kernels" / cache_key(request.variant, request.sm)


def _load(entry: Path) -> CompiledKernel | None:
    try:
        return decode(entry.read_bytes())
    except FileNotFoundError:
        return None


def _store(entry: Path, kernel: CompiledKernel) -> None:
    """The entry comes into being whole, however this process ends."""
    entry.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=entry.parent) as staging:
        part = Path(staging) / entry.name
        part.write_bytes(encode(kernel))
        os.replace(part, entry)
