"""Runs an engine of the tensorrt-rtx target on a GPU: TensorRT and CUDA alone, no torch."""

import os
from contextlib import ExitStack, suppress
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from llmbuild.cache import cache_root
from llmbuild.errors import UserError
from llmbuild.runtime.batch import ARRAYS, StepBatch
from llmbuild.runtime.engine import Engine
from llmbuild.runtime.executors.cuda import Cuda, CudaError
from llmbuild.runtime.executors.linear_kv import LinearSlots, SlotExecution
from llmbuild.runtime.executors.rtx_graphs import DecodeGraphs, GraphCounts, run_once
from llmbuild.runtime.executors.rtx_memory import PlanMemory
from llmbuild.runtime.executors.rtx_plan import CONTEXT, DECODE, Plan, PlanContext


class RtxExecutor:
    """A plan on the GPU with its KV caches; one step at a time.

    num_blocks: slots for sequences, and the scratch block, which takes no memory here: padding is
    left out of what is run. Raises EngineError where the plan or memory can't be had.
    """

    def __init__(self, engine: Engine, num_blocks: int) -> None:
        manifest, num_slots = engine.manifest, num_blocks - 1
        (rank,) = manifest.ranks
        name = rank.executables[engine.variant]
        self._process = os.getpid()
        self._context: PlanContext | None = None
        self._cuda = cuda = Cuda()
        # What is given back, the last taken first.
        self._close: ExitStack | None = (closing := ExitStack())
        closing.callback(cuda.close)
        try:
            cache = _jit_cache(manifest.files[name].sha256, engine.variant)
            self._plan = plan = Plan(engine.root / name, rank.plan_tensors, cuda, cache)
            closing.callback(plan.close)
            # The KV cache first: where there isn't enough memory, it is what can be made smaller.
            self._memory = PlanMemory(cuda, manifest, num_slots)
            closing.callback(self._memory.close)
            self._memory.take()
            plan.take_scratch()
            self._context = plan.make_context(CONTEXT)
            self._graphs = DecodeGraphs(cuda, self._memory, lambda: plan.make_context(DECODE))
            closing.callback(self._graphs.close)
            self._slots = LinearSlots(
                num_slots, self._memory.capacity, manifest.buckets, manifest.limits.max_sequences
            )
            cuda.synchronise()  # the caches are zeros
        except BaseException:
            self.close()
            raise

    @property
    def kv_bytes(self) -> int:
        """Of the GPU's memory."""
        return self._memory.kv_bytes

    @property
    def graph_counts(self) -> GraphCounts:
        """How many decode executions were launched as CUDA graphs."""
        return self._graphs.counts

    def step(self, batch: StepBatch) -> NDArray[np.float32]:
        """Logits [R, vocab] of one step, 0 for padding; the KV caches move forward."""
        logits = np.zeros((batch.num_logit_rows, self._memory.vocab_size), np.float32)
        for execution in self._executions(batch):
            logits[execution.results] = self._run(execution)
        if not np.isfinite(logits).all():
            self._memory.clear()
        return logits

    def step_greedy(self, batch: StepBatch, num_steps: int = 1) -> list[list[int]]:
        """The likeliest tokens of each row, of `num_steps` steps; as Executor says."""
        assert num_steps == 1 or batch.is_decode
        tokens = np.zeros((batch.num_logit_rows, num_steps), np.int32)
        for step in range(num_steps):
            if step > 0:
                batch = _next_step(batch, tokens[:, step - 1])
            for execution in self._executions(batch):
                tokens[execution.results, step] = likeliest(self._run(execution))
        if (tokens < 0).any():
            self._memory.clear()
        return [[int(token) for token in row] for row in tokens]

    def close(self) -> None:
        """Give all memory back. Closing twice is allowed."""
        closing, self._close = self._close, None
        self._context = None
        if closing is not None and self._process == os.getpid():  # a fork has none of it
            closing.callback(self._cuda.synchronise)  # first
            with suppress(CudaError):  # of a GPU that has failed nothing is left to give back
                closing.close()

    def __del__(self) -> None:
        if hasattr(self, "_close"):
            self.close()

    def _executions(self, batch: StepBatch) -> list[SlotExecution]:
        assert self._context is not None, "the executor is closed"
        if self._process != os.getpid():
            raise UserError("the engine was opened before this process was forked; open it here")
        return self._slots.executions(batch)

    def _run(self, execution: SlotExecution) -> NDArray[np.float32]:
        """The logits of the execution's results, [rows, vocab], as they stand until the next."""
        placed = self._memory.place(execution)
        if execution.is_decode:
            self._graphs.run((execution.num_slots, execution.first_slot), placed)
        else:
            assert self._context is not None
            run_once(self._cuda, self._memory, self._context, placed)
        return self._memory.logits(placed)[: len(execution.results)]


def likeliest(logits: NDArray[np.float32]) -> NDArray[np.int64]:
    """The token of each row's largest logit, the lowest of a tie; ~token where it isn't finite."""
    tokens = logits.argmax(axis=1)
    largest = np.take_along_axis(logits, tokens[:, None], axis=1)[:, 0]
    return np.where(np.isfinite(largest), tokens, ~tokens)


def _next_step(batch: StepBatch, tokens: NDArray[np.int32]) -> StepBatch:
    """The decode step on the tokens that this one gave. Of one that went wrong the tokens aren't
    used: 0 stands for it."""
    token_ids = np.zeros(batch.num_tokens, np.int32)
    token_ids[batch.logit_rows] = np.maximum(tokens, 0)
    later = {"positions": batch.positions + 1, "kv_lengths": batch.kv_lengths + 1}
    arrays = {name: getattr(batch, name) for name in ARRAYS}
    return StepBatch(**arrays | later | {"token_ids": token_ids})


def _jit_cache(plan_sha256: str, capability: str) -> Path | None:
    """Where kernels lie that were compiled of a plan, or None where there is no home."""
    try:
        return cache_root() / "rtx" / f"{plan_sha256}-{capability}"
    except RuntimeError:
        return None
