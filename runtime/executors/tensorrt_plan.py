"""A plan of TensorRT. Our kernels lie in it as PTX, so that nothing of them is registered here."""

from typing import Any

from llmbuild.runtime.executors.plan import Plan


class TensorrtPlan(Plan):
    def _new_context(self, profile: int) -> Any:
        managed = self._trt.ExecutionContextAllocationStrategy.USER_MANAGED
        return self._engine.create_execution_context(managed)
