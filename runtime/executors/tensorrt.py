"""Runs an engine of the tensorrt target on a GPU. Untried: it has met nothing but stand-ins for
TensorRT and CUDA."""

from llmbuild.runtime.batch import StepBatch
from llmbuild.runtime.executors.cuda import Cuda
from llmbuild.runtime.executors.execution import Execution
from llmbuild.runtime.executors.paged_kv import PagedSteps
from llmbuild.runtime.executors.paged_memory import PoolMemory
from llmbuild.runtime.executors.plan_executor import PlanExecutor
from llmbuild.runtime.executors.tensorrt_plan import TensorrtPlan
from llmbuild.runtime.gpu import load_tensorrt


class TensorrtExecutor(PlanExecutor[Execution]):
    """num_blocks: of every pool, the scratch block included."""

    def _prepare(self) -> None:
        manifest, limits = self._engine.manifest, self._engine.manifest.limits
        blocks = -(-limits.max_sequence_length // manifest.kv.block_size)
        self._steps = PagedSteps(
            limits.max_step_tokens, limits.max_sequences, blocks, manifest.buckets
        )

    def _make_plan(self, cuda: Cuda) -> TensorrtPlan:
        path = self._engine.root / self._rank.executables[self._engine.variant]
        return TensorrtPlan(load_tensorrt(), path, self._rank.plan_tensors, cuda)

    def _make_memory(self, cuda: Cuda) -> PoolMemory:
        return PoolMemory(cuda, self._engine.manifest, self._rank, self._num_blocks, self._steps)

    def _executions(self, batch: StepBatch) -> list[Execution]:
        return self._steps.executions(batch)

    def _graph_key(self, execution: Execution) -> int:
        """Pools lie where they lie, so that a bucket is enough."""
        return len(execution.inputs["kv_lengths"])
