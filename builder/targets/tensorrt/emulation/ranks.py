"""The networks of all ranks of an engine, run together on the CPU."""

import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmbuild.builder.graph.step_graph import NEXT_HIDDEN, OUTPUT
from llmbuild.builder.shard.graphs import RankGraph
from llmbuild.builder.targets.tensorrt.emulation.emulate import Emulated
from llmbuild.builder.targets.tensorrt.emulation.network import Total
from llmbuild.builder.targets.tensorrt.limits import HIDDEN
from llmbuild.errors import InternalError

Arrays = Mapping[str, NDArray[Any]]


class EmulatedRanks:
    """The networks of all ranks; those of a stage run in threads, in turns between the places where
    they add up, as Triton's interpreter runs one kernel at a time.

    make: a rank's network, of its graph and of what all_reduce gives for the rank's part.
    """

    def __init__(
        self, graphs: Sequence[RankGraph], make: Callable[[RankGraph, Total], Emulated]
    ) -> None:
        parallel = graphs[0].shard.parallel
        self._stages = [range(s * parallel.tp, (s + 1) * parallel.tp) for s in range(parallel.pp)]
        self._sums = [_Sum(parallel.tp) for _ in self._stages]
        self._ranks = [make(graph, self._sums[graph.shard.stage].total) for graph in graphs]

    def run(
        self, inputs: Arrays, own: Sequence[Arrays]
    ) -> tuple[NDArray[np.float32], list[Arrays]]:
        """Logits, [rows, vocab], and each rank's outputs. inputs: for all ranks, of which each
        takes those that it has. own: what each takes besides."""
        outputs: list[Arrays] = []
        for ranks, total in zip(self._stages, self._sums, strict=True):
            feeds = [{**self._feeds(rank, inputs, outputs), **own[rank]} for rank in ranks]
            networks = [self._ranks[rank] for rank in ranks]
            outputs += total.run([*map(_running, networks, feeds)])
        last = outputs[self._stages[-1].start :]
        return np.concatenate([each[OUTPUT] for each in last], axis=1), outputs

    def _feeds(self, rank: int, inputs: Arrays, before: Sequence[Arrays]) -> dict[str, Any]:
        names = self._ranks[rank].network.inputs
        feeds = {name: inputs[name] for name in names if name in inputs}
        return feeds | ({HIDDEN: before[-1][NEXT_HIDDEN]} if HIDDEN in names else {})


def _running(network: Emulated, feeds: Arrays) -> Callable[[], Arrays]:
    return lambda: network.run(feeds)


class _Sum:
    """What the ranks of a stage have together, of a value that each has a part of."""

    def __init__(self, size: int) -> None:
        self._size = self._running = size
        self._turn = threading.Condition()
        self._parts: list[Any] = []
        self._sum: Any = None
        self._num_sums = 0

    def run(self, ranks: Sequence[Callable[[], Arrays]]) -> list[Arrays]:
        """What each rank gives. Raises what the first that fails raises; the others end then."""
        self._running, self._parts = self._size, []
        with ThreadPoolExecutor(len(ranks)) as pool:
            running = [pool.submit(self._in_turns, rank) for rank in ranks]
        errors = [error for each in running if (error := each.exception()) is not None]
        causes = [each for each in errors if not isinstance(each, _Abandoned)]
        if errors:
            raise (causes or errors)[0]
        return [each.result() for each in running]

    def total(self, part: Any) -> Any:
        """Called by a rank in its turn, which others have until the sum is there."""
        self._parts.append(part)
        number = self._num_sums
        if len(self._parts) == self._size:
            self._sum, self._parts = sum(self._parts[1:], self._parts[0]), []
            self._num_sums += 1
            self._turn.notify_all()
        while self._num_sums == number and self._running == self._size:
            self._turn.wait()
        if self._num_sums == number:
            raise _Abandoned("the ranks of a stage add up a different number of times")
        return self._sum

    def _in_turns(self, run: Callable[[], Arrays]) -> Arrays:
        with self._turn:
            try:
                return run()
            finally:
                self._running -= 1
                self._turn.notify_all()


class _Abandoned(InternalError):
    """Of a rank that waited for another that had ended."""
