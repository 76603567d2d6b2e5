"""Requests served together through LLM.generate: latencies, and who the time goes to."""

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from unittest.mock import patch

import numpy as np
from numpy.typing import NDArray

from bench.roofline import Roofs, Work
from bench.step_work import StepWork
from llmbuild import LLM, SamplingParams
from llmbuild.runtime.batch import StepBatch
from llmbuild.runtime.executors import Executor
from llmbuild.runtime.loop import Request

RUNS = 3


@dataclass(frozen=True)
class Load:
    """Requests: (prompt tokens, output tokens) of each."""

    name: str
    requests: list[tuple[int, int]]


def even_load(sequences: int, longest: int) -> Load:
    """Equal requests, which decode together after one step."""
    return Load(f"{sequences} equal", [(min(16, longest // 2), min(64, longest // 2))] * sequences)


def mixed_load(sequences: int, longest: int) -> Load:
    """Prompts of 16 to 256 tokens, outputs of 16 to 128, as far as the engine's limit allows."""
    rng = np.random.default_rng(1)
    prompts, outputs = (
        rng.integers(min(16, high), high + 1, sequences).tolist()
        for high in (min(256, longest // 2), min(128, longest // 2))
    )
    return Load(f"{sequences} mixed", list(zip(prompts, outputs, strict=True)))


@dataclass(frozen=True)
class Serving:
    """One load's result. python_share: of the time between the ends of the first and of the last
    call of the executor, the part outside of it. steps: the work of each."""

    load: Load
    wall_s: float
    output_tokens_per_s: float
    ttft_p50_ms: float
    ttft_p99_ms: float
    tpot_p50_ms: float
    tpot_p99_ms: float
    python_share: float
    steps: list[Work]

    def bound_s(self, roofs: Roofs) -> float:
        """The least time for all steps, one after the other."""
        return sum(roofs.bound_s(work) for work in self.steps)


@dataclass
class Trace:
    """Times by time.perf_counter()."""

    calls: list[tuple[float, float]] = field(default_factory=list)  # start, end
    batches: list[tuple[StepBatch, int]] = field(default_factory=list)  # and steps, of each call
    submitted: dict[int, float] = field(default_factory=dict)  # by sequence id
    tokens: dict[int, list[float]] = field(default_factory=lambda: defaultdict(list))


@contextmanager
def traced(kind: type[Executor]) -> Iterator[Trace]:
    """Notes every call of executors of that kind, and every token of this process, meanwhile."""
    trace = Trace()
    step, step_greedy, emit = kind.step, kind.step_greedy, Request.emit

    def noted_call(start: float, batch: StepBatch, num_steps: int) -> None:
        trace.calls.append((start, time.perf_counter()))
        trace.batches.append((batch, num_steps))

    def timed_step(self: Executor, batch: StepBatch) -> NDArray[np.float32]:
        start = time.perf_counter()
        logits = step(self, batch)
        noted_call(start, batch, 1)
        return logits

    def timed_step_greedy(self: Executor, batch: StepBatch, num_steps: int = 1) -> list[list[int]]:
        start = time.perf_counter()
        rows = step_greedy(self, batch, num_steps)
        noted_call(start, batch, num_steps)
        return rows

    def timed_emit(self: Request, text: str, token_ids: tuple[int, ...]) -> None:
        times = trace.tokens[self.sequence.id]
        times += [time.perf_counter()] * len(token_ids)
        trace.submitted[self.sequence.id] = self.submitted_s
        emit(self, text, token_ids)

    with (
        patch.object(kind, "step", timed_step),
        patch.object(kind, "step_greedy", timed_step_greedy),
        patch.object(Request, "emit", timed_emit),
    ):
        yield trace


def later(batch: StepBatch, index: int) -> StepBatch:
    """The step of a pure decode so many steps on; its tokens are left as they are."""
    return StepBatch(
        token_ids=batch.token_ids,
        positions=batch.positions + np.int32(index),
        query_start=batch.query_start,
        kv_lengths=batch.kv_lengths + np.int32(index),
        block_tables=batch.block_tables,
        logit_rows=batch.logit_rows,
    )


def serve(llm: LLM, load: Load) -> Serving:
    """The run of median length out of RUNS, after one that isn't counted."""
    _run(llm, load)
    runs = sorted((_run(llm, load) for _ in range(RUNS)), key=lambda run: run.wall_s)
    return runs[RUNS // 2]


def _run(llm: LLM, load: Load) -> Serving:
    rng = np.random.default_rng(2)
    prompts = [rng.integers(0, llm.manifest.vocab_size, n).tolist() for n, _ in load.requests]
    params = [SamplingParams(max_tokens=n, ignore_eos=True) for _, n in load.requests]
    with traced(type(llm._executor)) as trace:
        start = time.perf_counter()
        completions = llm.generate(prompts, params)
        wall_s = time.perf_counter() - start
    failed = [c.error for c in completions if c.finish_reason != "length"]
    assert not failed, f"requests of {load.name} ended early: {failed}"
    ttft = [times[0] - trace.submitted[i] for i, times in trace.tokens.items()]
    tpot = [
        (times[-1] - times[0]) / (len(times) - 1)
        for times in trace.tokens.values()
        if len(times) > 1
    ]
    step_work = StepWork(llm.manifest)
    ttft_p50, ttft_p99 = np.percentile(ttft, [50, 99]).tolist()
    tpot_p50, tpot_p99 = np.percentile(tpot, [50, 99]).tolist()
    return Serving(
        load=load,
        wall_s=wall_s,
        output_tokens_per_s=sum(n for _, n in load.requests) / wall_s,
        ttft_p50_ms=ttft_p50 * 1e3,
        ttft_p99_ms=ttft_p99 * 1e3,
        tpot_p50_ms=tpot_p50 * 1e3,
        tpot_p99_ms=tpot_p99 * 1e3,
        python_share=python_share(trace.calls),
        steps=[
            step_work(later(batch, index))
            for batch, num_steps in trace.batches
            for index in range(num_steps)
        ],
    )


def python_share(calls: list[tuple[float, float]]) -> float:
    """The part of the time from the end of the first call to the end of the last that lies in no
    call; calls are (start, end), in order."""
    total = calls[-1][1] - calls[0][1]
    return 1 - sum(end - start for start, end in calls[1:]) / total
