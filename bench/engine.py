"""Times an engine's steps and its serving: python -m bench.engine ENGINE_DIR [--json FILE]."""

import time
from dataclasses import dataclass
from pathlib import Path

import click
import numpy as np

from bench import machine, native, report
from bench.machine import Machine
from bench.roofline import Roofs, Work
from bench.serving import Serving, even_load, mixed_load, serve
from bench.step_work import StepWork
from bench.timing import median_seconds
from llmbuild import LLM
from llmbuild.runtime.batch import StepBatch
from llmbuild.runtime.engine import Engine, open_engine
from llmbuild.runtime.executors.cpu import CpuExecutor
from llmbuild.runtime.manifest import Limits, Manifest
from llmbuild.runtime.threads import choose_num_threads

DECODE_BATCHES = (1, 8, 32)
CONTEXTS = (128, 2048)
PREFILL = 512
REQUESTS = (8, 32)
STEP_HEADERS = ("step", "tokens/s", "ms", "bound ms", "bound by", "reached")
SERVING_HEADERS = (
    *("requests", "output tokens/s", "TTFT p50 ms", "TTFT p99 ms"),
    *("TPOT p50 ms", "TPOT p99 ms", "Python", "bound tokens/s", "reached"),
)


@dataclass(frozen=True)
class StepTiming:
    """A step of `sequences` with `new_tokens` each, `context` tokens long after it."""

    sequences: int
    new_tokens: int
    context: int
    work: Work
    seconds: float

    @property
    def name(self) -> str:
        if self.new_tokens > 1:
            return f"prefill {self.new_tokens}"
        return f"decode batch {self.sequences} at {self.context}"

    @property
    def tokens_per_s(self) -> float:
        return self.sequences * self.new_tokens / self.seconds


@dataclass(frozen=True)
class EngineReport:
    engine: str
    precision: str
    before: Machine
    after: Machine
    steps: list[StepTiming]
    servings: list[Serving]


def measure(root: Path, threads: int) -> EngineReport:
    """Steps on pinned threads, then serving as LLM does it, between two measurements of the
    machine. What exceeds the engine's limits is cut to them. Of an engine of several ranks there
    are no steps, as the KV memory of other processes can't be filled from here."""
    engine = open_engine(root)
    StepWork(engine.manifest)  # refuses what has no bound here, before anything is measured
    before = machine.measure(threads)
    sizes = _step_sizes(engine.manifest.limits) if len(engine.manifest.ranks) == 1 else []
    steps = [time_step(engine, threads, *each) for each in sizes]
    servings = _servings(root, engine.manifest, threads)
    after = machine.measure(threads)
    manifest = engine.manifest
    return EngineReport(manifest.name, manifest.precision, before, after, steps, servings)


def _step_sizes(limits: Limits) -> list[tuple[int, int, int]]:
    """(sequences, new tokens, context) of every step; what comes out equal is measured once."""
    longest = limits.max_sequence_length
    most = min(limits.max_sequences, limits.max_step_tokens)
    prefill = min(PREFILL, limits.max_step_tokens, longest)
    decodes = [(min(b, most), 1, min(c, longest)) for c in CONTEXTS for b in DECODE_BATCHES]
    return list(dict.fromkeys([*decodes, (1, prefill, prefill)]))


def time_step(
    engine: Engine, threads: int, sequences: int, new_tokens: int, context: int
) -> StepTiming:
    """The same step again and again: it writes the same KV slots each time."""
    block_size = engine.manifest.kv.block_size
    blocks = -(-context // block_size)
    executor = CpuExecutor(engine, 1 + sequences * blocks, threads, pin_threads=True)
    # Untouched memory is one page of zeros, which would stay in a cache; computing the KV of long
    # contexts would take minutes.
    executor._kv[:] = native.filled(executor.kv_bytes)[: executor.kv_bytes]
    starts = np.arange(sequences + 1, dtype=np.int32) * new_tokens
    span = np.arange(context - new_tokens, context, dtype=np.int32)
    tokens = np.random.default_rng(3).integers(0, executor.vocab_size, sequences * new_tokens)
    batch = StepBatch(
        token_ids=tokens.astype(np.int32),
        positions=np.tile(span, sequences),
        query_start=starts.astype(np.int32),
        kv_lengths=np.full(sequences, context, np.int32),
        block_tables=np.arange(1, 1 + sequences * blocks, dtype=np.int32).reshape(sequences, -1),
        logit_rows=(starts[1:] - 1).astype(np.int32),
    )

    def sample(calls: int) -> float:
        executor.step(batch)
        start = time.perf_counter()
        for _ in range(calls):
            executor.step(batch)
        return (time.perf_counter() - start) / calls

    try:
        seconds = median_seconds(sample)
    finally:
        executor.close()
    work = StepWork(engine.manifest)(batch)
    return StepTiming(sequences, new_tokens, context, work, seconds)


def _servings(root: Path, manifest: Manifest, threads: int) -> list[Serving]:
    longest = manifest.limits.max_sequence_length
    loads = [even_load(n, longest) for n in DECODE_BATCHES]
    loads += [mixed_load(n, longest) for n in REQUESTS]
    blocks = -(-min(longest, 512) // manifest.kv.block_size)
    threads_of_rank = max(1, threads // len(manifest.ranks))
    with LLM(root, num_blocks=1 + max(REQUESTS) * blocks, num_threads=threads_of_rank) as llm:
        return [serve(llm, load) for load in loads]


def step_table(steps: list[StepTiming], roofs: Roofs) -> str:
    rows = [
        [
            step.name,
            report.figure(step.tokens_per_s),
            report.figure(step.seconds * 1e3),
            report.figure(roofs.bound_s(step.work) * 1e3),
            roofs.bound_by(step.work),
            report.percent(roofs.fraction(step.work, step.seconds)),
        ]
        for step in steps
    ]
    return report.table(STEP_HEADERS, rows)


def serving_table(servings: list[Serving], roofs: Roofs) -> str:
    rows = []
    for serving in servings:
        reached = serving.bound_s(roofs) / serving.wall_s
        latencies = (serving.ttft_p50_ms, serving.ttft_p99_ms)
        rates = (serving.tpot_p50_ms, serving.tpot_p99_ms)
        rows.append(
            [
                serving.load.name,
                *map(report.figure, (serving.output_tokens_per_s, *latencies, *rates)),
                f"{serving.python_share:.1%}",
                report.figure(serving.output_tokens_per_s / reached),
                report.percent(reached),
            ]
        )
    return report.table(SERVING_HEADERS, rows)


@click.command()
@click.argument("engine_dir", type=click.Path(path_type=Path))
@click.option("--threads", type=int, help="By default all processors of this process.")
@click.option("--json", "json_path", type=click.Path(path_type=Path), metavar="FILE")
def main(engine_dir: Path, threads: int | None, json_path: Path | None) -> None:
    """Decode, prefill and serving of the engine ENGINE_DIR, beside this machine's roofline."""
    report.check_output(json_path)
    result = measure(engine_dir, choose_num_threads(threads))
    roofs = machine.best_roofs(result.before, result.after)
    click.echo(f"Engine {result.engine}, {result.precision}\n")
    click.echo(machine.summary(result.before))
    if result.steps:
        click.echo(step_table(result.steps, roofs))
    click.echo(f"\n{serving_table(result.servings, roofs)}")
    click.echo(f"\nAfterwards:\n{machine.summary(result.after)}")
    if json_path is not None:
        report.write_json(json_path, result)


if __name__ == "__main__":
    report.run(main)
