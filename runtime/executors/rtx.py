"""Runs an engine of the tensorrt-rtx target on a GPU."""

from pathlib import Path

from llmbuild.cache import cache_root
from llmbuild.runtime.batch import StepBatch
from llmbuild.runtime.executors.cuda import Cuda
from llmbuild.runtime.executors.linear_kv import LinearSlots, SlotExecution
from llmbuild.runtime.executors.plan_executor import PlanExecutor
from llmbuild.runtime.executors.rtx_memory import SlotMemory
from llmbuild.runtime.executors.rtx_plan import RtxPlan


class RtxExecutor(PlanExecutor[SlotExecution]):
    """num_blocks: slots for sequences, and the scratch block, which takes no memory here: padding
    is left out of what is run, and has logits of 0."""

    def _prepare(self) -> None:
        limits, buckets = self._engine.manifest.limits, self._engine.manifest.buckets
        self._num_slots = self._num_blocks - 1
        self._slots = LinearSlots(
            *(self._num_slots, limits.max_sequence_length, buckets),
            limits.max_sequences,
        )

    def _make_plan(self, cuda: Cuda) -> RtxPlan:
        rank = self._rank
        name = rank.executables[self._engine.variant]
        cache = _jit_cache(self._engine.manifest.files[name].sha256, self._engine.variant)
        return RtxPlan(self._engine.root / name, rank.plan_tensors, cuda, cache)

    def _make_memory(self, cuda: Cuda) -> SlotMemory:
        return SlotMemory(cuda, self._engine.manifest.limits, self._rank, self._num_slots)

    def _executions(self, batch: StepBatch) -> list[SlotExecution]:
        return self._slots.executions(batch)

    def _graph_key(self, execution: SlotExecution) -> tuple[int, int]:
        """Its caches begin at its first slot."""
        return execution.num_slots, execution.first_slot


def _jit_cache(plan_sha256: str, capability: str) -> Path | None:
    """Where kernels lie that were compiled of a plan, or None where there is no home."""
    try:
        return cache_root() / "rtx" / f"{plan_sha256}-{capability}"
    except RuntimeError:
        return None
