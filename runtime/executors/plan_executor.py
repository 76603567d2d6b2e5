"""Runs an engine of plans on a GPU: TensorRT and CUDA alone, no torch."""

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Sequence
from contextlib import ExitStack, suppress
from typing import Generic

import numpy as np
from numpy.typing import NDArray

from llmbuild.errors import UserError
from llmbuild.runtime.batch import StepBatch
from llmbuild.runtime.engine import Engine
from llmbuild.runtime.executors.cuda import Cuda, CudaError
from llmbuild.runtime.executors.decode_graphs import DecodeGraphs, GraphCounts, run_once
from llmbuild.runtime.executors.greedy import likeliest, next_step
from llmbuild.runtime.executors.nccl import Communicator
from llmbuild.runtime.executors.plan import CONTEXT, DECODE, Plan, PlanContext
from llmbuild.runtime.executors.plan_memory import E, PlanMemory


class PlanExecutor(ABC, Generic[E]):
    """A rank's plan on a GPU with its KV cache; one step at a time. Logits are those of the rank's
    tokens. num_blocks: of the KV cache, the scratch block included. join: of a rank that shares
    layers with others, gives its end of the communicator when all else is there."""

    _memory: PlanMemory[E]

    def __init__(
        self,
        engine: Engine,
        num_blocks: int,
        rank: int = 0,
        join: Callable[[], Communicator] | None = None,
    ) -> None:
        """Raises EngineError where the plan or memory can't be had."""
        self._engine, self._rank = engine, engine.manifest.ranks[rank]
        self._num_blocks, self._device, self._join = num_blocks, rank, join
        self._prepare()
        self._open()

    @abstractmethod
    def _prepare(self) -> None:
        """What is needed before anything is taken."""

    def _open(self) -> None:
        """Take all that is needed. Raises EngineError where the plan or memory can't be had."""
        self._process = os.getpid()
        self._context: PlanContext | None = None
        self._cuda = cuda = Cuda(self._device)
        # What is given back, the last taken first.
        self._close: ExitStack | None = (closing := ExitStack())
        closing.callback(cuda.close)
        try:
            plan = self._make_plan(cuda)
            closing.callback(plan.close)
            # The KV cache first: where there isn't enough memory, it is what can be made smaller.
            self._memory = self._make_memory(cuda)
            closing.callback(self._memory.close)
            self._memory.take()
            plan.take_scratch()
            if self._join is not None:
                plan.communicator = self._join()
                closing.callback(plan.communicator.close)
            self._context = plan.make_context(CONTEXT)
            self._graphs = DecodeGraphs(cuda, self._memory, lambda: plan.make_context(DECODE))
            closing.callback(self._graphs.close)
            cuda.synchronise()  # the KV cache is zeros
        except BaseException:
            self.close()
            raise

    @abstractmethod
    def _make_plan(self, cuda: Cuda) -> Plan: ...

    @abstractmethod
    def _make_memory(self, cuda: Cuda) -> PlanMemory[E]: ...

    @abstractmethod
    def _executions(self, batch: StepBatch) -> Sequence[E]:
        """Of one step."""

    @abstractmethod
    def _graph_key(self, execution: E) -> Hashable:
        """What tells decode executions apart that can't share a graph."""

    @property
    def kv_bytes(self) -> int:
        """Of the GPU's memory."""
        return self._memory.kv_bytes

    @property
    def graph_counts(self) -> GraphCounts:
        """How many decode executions were launched as CUDA graphs."""
        return self._graphs.counts

    def step(self, batch: StepBatch) -> NDArray[np.float32]:
        """Logits [R, tokens] of one step; the KV cache moves forward."""
        self._check_open()
        logits = np.zeros((batch.num_logit_rows, self._memory.num_tokens), np.float32)
        for execution in self._executions(batch):
            logits[execution.results] = self._run(execution)
        if not np.isfinite(logits).all():
            self._memory.recover()
        return logits

    def step_greedy(self, batch: StepBatch, num_steps: int = 1) -> list[list[int]]:
        """The likeliest tokens of each row, of `num_steps` steps; as Executor says."""
        self._check_open()
        assert num_steps == 1 or batch.is_decode
        tokens = np.zeros((batch.num_logit_rows, num_steps), np.int32)
        for step in range(num_steps):
            if step > 0:
                batch = next_step(batch, tokens[:, step - 1])
            for execution in self._executions(batch):
                tokens[execution.results, step] = likeliest(self._run(execution))
        if (tokens < 0).any():
            self._memory.recover()
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

    def _check_open(self) -> None:
        assert self._context is not None, "the executor is closed"
        if self._process != os.getpid():
            raise UserError("the engine was opened before this process was forked; open it here")

    def _run(self, execution: E) -> NDArray[np.float32]:
        """The logits of the execution's results, [rows, tokens], as they stand until the next."""
        placed = self._memory.place(execution)
        if execution.is_decode:
            self._graphs.run(self._graph_key(execution), placed)
        else:
            assert self._context is not None
            run_once(self._cuda, self._memory, self._context, placed)
        return self._memory.logits(placed)[: len(execution.results)]
