"""Runs every case on every engine in turn, between measurements of the machine."""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from bench import machine
from bench.machine import Machine
from bench.peers.contestant import Contestant, Result
from bench.peers.drivers.line_protocol import Setup
from bench.peers.variants import Variant
from bench.peers.work_folder import Unavailable, WorkFolder
from bench.peers.workload import Case, max_kv_tokens, max_sequence
from bench.report import figure
from llmbuild.errors import UserError

SLOW_START_S = 10  # what starts slower is started once


@dataclass(frozen=True)
class Comparison:
    """A whole run. absent: why, by the variant's or the peer's name."""

    threads: int
    repeats: int
    machines: list[Machine]
    results: list[Result]
    absent: dict[str, str]


def compare(
    models: Mapping[Variant, Path],
    cases: Sequence[Case],
    repeats: int,
    threads: int,
    patience_s: float,
    work: WorkFolder,
    say: Callable[[str], None],
) -> Comparison:
    """Each round of a case visits all engines, of which only one is awake at a time."""
    processors = choose_processors(threads)
    os.sched_setaffinity(0, processors)  # of all that is started from here on, too
    setup = Setup(
        threads=threads,
        processors=processors,
        max_sequence=max_sequence(cases),
        max_requests=max(len(case.prompts) for case in cases),
        kv_tokens=max_kv_tokens(cases),
    )
    say("measuring the machine")
    machines = [machine.measure(threads)]
    contestants = [
        Contestant(variant, path, setup, work, patience_s) for variant, path in models.items()
    ]
    absent = {}
    try:
        for contestant in list(contestants):
            say(f"starting {contestant.name}")
            try:
                contestant.start()
            except Unavailable as error:
                absent[contestant.name] = str(error)
                contestants.remove(contestant)
        for index, case in enumerate(cases):
            if index == len(cases) // 2:
                machines.append(machine.measure(threads))
            _run_case(case, contestants, repeats, say)
    finally:
        for contestant in contestants:
            contestant.close()
    _start_again(contestants, repeats - 1, say)
    machines.append(machine.measure(threads))
    return Comparison(threads, repeats, machines, [c.result for c in contestants], absent)


def choose_processors(threads: int) -> list[int]:
    """Of those that this process may use, on as many cores as there are; ascending."""
    allowed = sorted(os.sched_getaffinity(0))
    if not 1 <= threads <= len(allowed):
        raise UserError(
            f"--threads is {threads}; this process may use {len(allowed)} processors, and each "
            "thread is pinned to one of its own"
        )
    firsts = {_core_of(processor): processor for processor in reversed(allowed)}
    others = [processor for processor in allowed if processor not in firsts.values()]
    return sorted([*sorted(firsts.values()), *others][:threads])


def _core_of(processor: int) -> str:
    """The processors that share its core, as text."""
    path = Path(f"/sys/devices/system/cpu/cpu{processor}/topology/thread_siblings_list")
    return path.read_text() if path.exists() else str(processor)


def _run_case(
    case: Case, contestants: Sequence[Contestant], repeats: int, say: Callable[[str], None]
) -> None:
    """Each round starts with another one, so that none always follows the same."""
    for index in range(repeats):
        say(f"{case.name}, round {index + 1} of {repeats}")
        first = index % max(1, len(contestants))
        for contestant in (*contestants[first:], *contestants[:first]):
            visit = contestant.visit(case)
            if visit is not None:
                say(f"  {contestant.name}: {figure(visit.tokens_per_s)} tokens/s")
    if case.measure == "serving":
        for contestant in contestants:
            contestant.note_memory()  # a larger load comes later, and its memory counts


def _start_again(contestants: Sequence[Contestant], times: int, say: Callable[[str], None]) -> None:
    """For more load times, of what loads fast."""
    quick = [c for c in contestants if c.result.loads_s[0] <= SLOW_START_S]
    for index in range(times):
        say(f"loading, round {index + 2} of {times + 1}")
        for contestant in quick:
            try:
                contestant.start()
            except Unavailable:
                continue  # the loads before count
            contestant.close()
