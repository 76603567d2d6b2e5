"""The networks of all ranks of an engine for TensorRT for RTX, run together on the CPU."""

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import repeat
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from llmbuild.builder.graph.step_graph import NEXT_HIDDEN, OUTPUT
from llmbuild.builder.shard.graphs import RankGraph
from llmbuild.builder.targets.tensorrt.emulation.emulate import Emulated, emulate
from llmbuild.builder.targets.tensorrt.limits import (
    HIDDEN,
    ActivationDtype,
    Limits,
    cache_name,
    updated_name,
)
from llmbuild.runtime.batch import StepBatch
from llmbuild.runtime.executors.linear_kv import SlotExecution

_CACHE_DTYPES = {"fp16": np.dtype(np.float16), "bf16": np.dtype(ml_dtypes.bfloat16)}

Caches = dict[str, NDArray[Any]]


class EmulatedRanks:
    """The networks of all ranks, with their KV caches; ranks of a stage run in threads that meet
    where they add up."""

    def __init__(
        self,
        graphs: Sequence[RankGraph],
        limits: Limits,
        activations: ActivationDtype,
        num_slots: int,
    ) -> None:
        parallel = graphs[0].shard.parallel
        self._ranks: list[Emulated] = []
        self._caches: list[Caches] = []
        self._stages = [range(s * parallel.tp, (s + 1) * parallel.tp) for s in range(parallel.pp)]
        sums = [_Sum(parallel.tp) for _ in self._stages]
        for graph in graphs:
            total = sums[graph.shard.stage].total
            arguments = (graph.step, graph.config, limits, activations, graph.read)
            self._ranks.append(emulate(*arguments, total))
            shape = (num_slots, graph.config.num_kv_heads, limits.capacity, graph.config.head_dim)
            self._caches.append(
                {
                    cache_name(layer, kind): np.zeros(shape, _CACHE_DTYPES[activations])
                    for layer in range(graph.config.num_layers)
                    for kind in "kv"
                }
            )

    def step(self, batch: StepBatch, executions: Sequence[SlotExecution]) -> NDArray[np.float32]:
        """Logits of a step, [R, vocab]."""
        vocab_size = 0
        parts: list[tuple[NDArray[np.int32], NDArray[np.float32]]] = []
        for execution in executions:
            logits = self._execute(execution)
            vocab_size = logits.shape[1]
            parts.append((execution.results, logits[: len(execution.results)]))
        result = np.zeros((batch.num_logit_rows, vocab_size), np.float32)
        for rows, logits in parts:
            result[rows] = logits
        return result

    def _execute(self, execution: SlotExecution) -> NDArray[np.float32]:
        hidden: NDArray[Any] | None = None
        for ranks in self._stages:
            with ThreadPoolExecutor(len(ranks)) as pool:
                outputs = list(pool.map(self._run, ranks, repeat(execution), repeat(hidden)))
            if OUTPUT in outputs[0]:
                return np.concatenate([each[OUTPUT] for each in outputs], axis=1)
            hidden = outputs[0][NEXT_HIDDEN]
        raise AssertionError("no stage makes logits")

    def _run(self, rank: int, execution: SlotExecution, hidden: NDArray[Any] | None) -> Caches:
        first, end = execution.first_slot, execution.first_slot + execution.num_slots
        caches = self._caches[rank]
        feeds: Caches = {name: cache[first:end] for name, cache in caches.items()}
        for name in self._ranks[rank].network.inputs:
            if name in execution.inputs:
                feeds[name] = execution.inputs[name]
        if hidden is not None:
            feeds[HIDDEN] = hidden
        outputs = self._ranks[rank].run(feeds)
        for layer in range(len(caches) // 2):
            for kind in "kv":
                caches[cache_name(layer, kind)][first:end] = outputs[updated_name(layer, kind)]
        return outputs


class _Sum:
    """What the ranks of a stage have together, of a value that each has a part of."""

    def __init__(self, size: int) -> None:
        self._barrier = threading.Barrier(size)
        self._parts: list[Any] = []
        self._lock = threading.Lock()

    def total(self, part: Any) -> Any:
        with self._lock:
            self._parts.append(part)
        if self._barrier.wait() == 0:  # one of the ranks adds up
            self._sum = sum(self._parts[1:], self._parts[0])
            self._parts = []
        self._barrier.wait()
        return self._sum
