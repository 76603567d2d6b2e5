"""The comparison as Markdown: what each engine gave, of what bound, and ours over the best peer."""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from bench import machine
from bench.peers.bounds import kv_token_bytes, least_work, roofs
from bench.peers.contestant import Result
from bench.peers.quiet import QUIET
from bench.peers.run import Comparison
from bench.peers.variants import CONTINUOUS, OURS, PEERS, STATIC
from bench.peers.workload import Case
from bench.report import figure, percent

MB = 1e6


@dataclass(frozen=True)
class Measure:
    """A figure of each engine. samples: its values, none where it has none."""

    name: str
    samples: Callable[[Result], Sequence[float]]
    more_is_better: bool = False

    def median(self, result: Result) -> float | None:
        samples = self.samples(result)
        return statistics.median(samples) if samples else None


def measures(cases: Sequence[Case]) -> list[Measure]:
    """A rate for each case, and of a prefill the time to the first token; load time and memory."""
    rates = [Measure(f"{case.name} tokens/s", _rates_of(case), True) for case in cases]
    waits = [
        Measure(f"{case.name} ms", _waits_of(case)) for case in cases if case.measure == "prefill"
    ]
    return [
        *rates,
        *waits,
        Measure("load ms", lambda result: [1e3 * load for load in result.loads_s]),
        Measure("resident MB", lambda result: _in_mb(result.resident_bytes)),
        Measure("peak MB", lambda result: _in_mb(result.peak_bytes)),
    ]


def write(comparison: Comparison, cases: Sequence[Case]) -> str:
    """The whole report."""
    shown = measures(cases)
    parts = [
        "# Peers, side by side",
        _conditions(comparison),
        f"## What each engine gave\n\n{_figures(comparison.results, shown)}",
        f"## Ours over the best peer\n\n{_ratios(comparison.results, shown)}",
        f"## Of the machine's bound\n\n{_fractions(comparison, cases)}",
        f"## The machine\n\n{_machines(comparison)}",
        f"## Versions\n\n{_versions(comparison.results)}",
        _lacks(comparison),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def markdown(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table that reads well as text, too."""
    widths = [max(map(len, column)) for column in zip(headers, *rows, strict=True)]

    def line(cells: Sequence[str]) -> str:
        padded = [cell.ljust(width) for cell, width in zip(cells, widths, strict=True)]
        return f"| {' | '.join(padded)} |"

    return "\n".join(line(cells) for cells in (headers, ["-" * width for width in widths], *rows))


def ratio(measure: Measure, ours: Result, peer: Result) -> float | None:
    """How many times better ours is; None where one of them has no figure."""
    own, other = measure.median(ours), measure.median(peer)
    if own is None or other is None:
        return None
    return own / other if measure.more_is_better else other / own


def best_peer(measure: Measure, results: Sequence[Result]) -> Result | None:
    """The peers' best at this measure."""
    peers = [
        (value, result)
        for result in results
        if result.variant.peer != OURS and (value := measure.median(result)) is not None
    ]
    choose = max if measure.more_is_better else min
    return choose(peers, key=lambda pair: pair[0])[1] if peers else None


def fraction(comparison: Comparison, case: Case, result: Result) -> float | None:
    """Of the rate that the machine's bound allows; None without a figure."""
    rates = result.rates(case.name)
    if not rates:
        return None
    variant = result.variant
    roof = roofs(comparison.machines, variant.peak)
    work = least_work(case, result.weights_bytes, kv_token_bytes(variant.kv_item_bytes))
    return statistics.median(rates) * roof.bound_s(work) / case.measured_tokens


def _rates_of(case: Case) -> Callable[[Result], Sequence[float]]:
    return lambda result: result.rates(case.name)


def _waits_of(case: Case) -> Callable[[Result], Sequence[float]]:
    return lambda result: [1e3 * case.measured_tokens / rate for rate in result.rates(case.name)]


def _in_mb(size: int | None) -> list[float]:
    return [] if size is None else [size / MB]


def _conditions(comparison: Comparison) -> str:
    first = comparison.machines[0]
    visits = [visit for result in comparison.results for visit in result.visits]
    disturbed = sum(visit.others > QUIET for visit in visits)
    return (
        f"SmolLM2-135M-Instruct on {first.cpu}, {comparison.threads} pinned threads, {first.date}. "
        f"Rounds: {comparison.repeats}; their medians, in brackets the least and the most. In "
        f"{disturbed} of {len(visits)} runs, other processes used more than {percent(QUIET)} of a "
        "processor."
    )


def _figures(results: Sequence[Result], shown: Sequence[Measure]) -> str:
    rows = [
        [
            result.variant.name + _mark(result),
            *(_with_range(measure.samples(result)) for measure in shown),
        ]
        for result in results
    ]
    notes = (
        f"\n\n{STATIC}: it has no continuous batching on processors; requests together are one "
        "batch of padded prompts that runs until the longest is done."
    )
    is_noted = any(_mark(result) for result in results)
    return markdown(["engine", *(m.name for m in shown)], rows) + (notes if is_noted else "")


def _mark(result: Result) -> str:
    peer = PEERS.get(result.variant.peer)
    return f" ({STATIC})" if peer is not None and peer.batching != CONTINUOUS else ""


def _with_range(samples: Sequence[float]) -> str:
    if not samples:
        return "-"
    median = figure(statistics.median(samples))
    if len(samples) == 1:
        return median
    return f"{median} ({figure(min(samples))}..{figure(max(samples))})"


def _ratios(results: Sequence[Result], shown: Sequence[Measure]) -> str:
    ours = [result for result in results if result.variant.peer == OURS]
    rows = []
    for measure in shown:
        peer = best_peer(measure, results)
        if peer is not None:
            ratios = [ratio(measure, own, peer) for own in ours]
            cells = ["-" if value is None else f"{value:.2f}x" for value in ratios]
            rows.append([measure.name, peer.variant.name, figure(measure.median(peer)), *cells])
    if not rows:
        return "No peer gave a figure."
    return markdown(["measure", "best peer", "its", *(r.variant.name for r in ours)], rows)


def _fractions(comparison: Comparison, cases: Sequence[Case]) -> str:
    rows = []
    for result in comparison.results:
        variant = result.variant
        reached = [fraction(comparison, case, result) for case in cases]
        rows.append(
            [
                variant.name,
                figure(result.weights_bytes / MB),
                figure(kv_token_bytes(variant.kv_item_bytes) / 1e3),
                variant.peak,
                *("-" if part is None else percent(part) for part in reached),
            ]
        )
    headers = ["engine", "weights MB", "KV kB/token", "peak", *(case.name for case in cases)]
    return markdown(headers, rows)


def _machines(comparison: Comparison) -> str:
    """What was measured before, amid and after the runs."""
    rows = []
    for record in comparison.machines:
        reads = [figure(value / 1e9) for value in record.read_bytes_per_s.values()]
        peaks = [
            figure(None if value is None else value / 1e9)
            for value in record.operations_per_s.values()
        ]
        rows.append([record.date, f"{record.load_average:.2f}", *reads, *peaks])
    headers = [
        *("date", "load"),
        *(f"read {size} GB/s" for size in machine.READ_SIZES),
        *(f"{peak} Gop/s" for peak in machine.PEAKS),
    ]
    return (
        f"{markdown(headers, rows)}\n\nBounds take the highest read of {machine.MEMORY} and peaks."
    )


def _versions(results: Sequence[Result]) -> str:
    return "\n".join(f"- {r.variant.name}: {r.versions}" for r in results)


def _lacks(comparison: Comparison) -> str:
    """Who couldn't take part, and what failed."""
    lines = [f"- {name}: {reason}" for name, reason in comparison.absent.items()]
    lines += [
        f"- {result.variant.name}, {case}: {reason}"
        for result in comparison.results
        for case, reason in result.failures.items()
    ]
    return "## Missing\n\n" + "\n".join(lines) if lines else ""
