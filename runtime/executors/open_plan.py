"""Opens what runs a rank's plan, of either kind."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from llmbuild.runtime.target import RtxTarget

if TYPE_CHECKING:
    from llmbuild.runtime.engine import Engine
    from llmbuild.runtime.executors.nccl import Communicator
    from llmbuild.runtime.executors.plan_executor import PlanExecutor


def open_plan(
    engine: "Engine",
    num_blocks: int,
    rank: int = 0,
    join: "Callable[[], Communicator] | None" = None,
) -> "PlanExecutor[Any]":
    """num_blocks, join: as the executors have them. Raises EngineError."""
    if isinstance(engine.manifest.target, RtxTarget):
        from llmbuild.runtime.executors.rtx import RtxExecutor

        return RtxExecutor(engine, num_blocks, rank, join)

    from llmbuild.runtime.executors.tensorrt import TensorrtExecutor

    return TensorrtExecutor(engine, num_blocks, rank, join)
