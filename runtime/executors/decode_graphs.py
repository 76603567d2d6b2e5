"""Decode executions as CUDA graphs: recorded once, launched as one piece after that.

A graph holds the shapes and addresses that it was recorded with, which an execution's key stands
for. There is one for each key: recorded when such an execution comes the second time, and
MAX_GRAPHS at most; what comes beyond is run without.
"""

from collections import Counter
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

from llmbuild.runtime.executors.cuda import Cuda
from llmbuild.runtime.executors.plan import PlanContext
from llmbuild.runtime.executors.plan_memory import Placed, PlanMemory

MAX_GRAPHS = 64


@dataclass
class GraphCounts:
    """Decode executions so far. recorded: graphs there are. is_possible: whether TensorRT lets this
    plan be recorded."""

    launched: int = 0
    without: int = 0
    recorded: int = 0
    is_possible: bool = True

    @property
    def hit_rate(self) -> float:
        """The share of executions that were launched as a graph."""
        return self.launched / max(1, self.launched + self.without)


class DecodeGraphs:
    """Runs decode executions. make_context: gives a new context of the decode profile."""

    def __init__(
        self, cuda: Cuda, memory: PlanMemory[Any], make_context: Callable[[], PlanContext]
    ) -> None:
        self.counts = GraphCounts()
        self._cuda, self._memory, self._make_context = cuda, memory, make_context
        self._plain = make_context()
        self._graphs: dict[Hashable, tuple[int, PlanContext]] = {}  # a graph needs its context
        self._seen: Counter[Hashable] = Counter()

    def run(self, key: Hashable, placed: Placed) -> None:
        """Run it to its end."""
        if key in self._graphs:
            self._cuda.launch(self._graphs[key][0])
            self._cuda.synchronise()
            self.counts.launched += 1
            return
        self._seen[key] += 1
        has_room = self.counts.is_possible and len(self._graphs) < MAX_GRAPHS
        is_recorded = has_room and self._seen[key] > 1
        context = self._make_context() if is_recorded else self._plain
        # Before it is recorded a shape runs once: TensorRT takes memory and compiles kernels then.
        run_once(self._cuda, self._memory, context, placed)
        self.counts.without += 1
        if is_recorded:
            self._record(key, context, placed)

    def close(self) -> None:
        """Graphs before their contexts."""
        for graph, _ in self._graphs.values():
            self._cuda.destroy_graph(graph)
        self._graphs.clear()
        del self._plain

    def _record(self, key: Hashable, context: PlanContext, placed: Placed) -> None:
        if not context.is_capturable:
            self.counts.is_possible = False
            return
        self._cuda.begin_capture()
        try:
            enqueue(self._memory, context, placed)
        except BaseException:
            self._cuda.abandon_capture()
            raise
        self._graphs[key] = self._cuda.end_capture(), context
        self.counts.recorded += 1


def run_once(cuda: Cuda, memory: PlanMemory[Any], context: PlanContext, placed: Placed) -> None:
    """Run an execution to its end, without a graph."""
    context.bind(placed.shapes, placed.addresses)
    enqueue(memory, context, placed)
    cuda.synchronise()


def enqueue(memory: PlanMemory[Any], context: PlanContext, placed: Placed) -> None:
    """Put an execution that is bound into the stream: inputs, plan, logits."""
    memory.copy_in(placed)
    context.enqueue()
    memory.copy_out(placed)
