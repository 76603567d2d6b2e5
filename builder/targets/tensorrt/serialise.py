"""Has TensorRT build a plan, and ends that when it is interrupted."""

import signal
from typing import Any

from llmbuild.errors import BuildError
from llmbuild.runtime.interrupts import deferred_interrupts
from llmbuild.runtime.tensorrt_log import CollectedLog


def serialise(trt: Any, builder: Any, network: Any, settings: Any, log: CollectedLog) -> bytes:
    """The plan of a network. Raises BuildError with what the log says where there is none.

    A signal ends the build after the step that TensorRT is at. It can't be handled before: what a
    handler raises while TensorRT calls its log or its monitor is lost.
    """
    with deferred_interrupts(signal.SIGHUP, signal.SIGINT, signal.SIGTERM) as interrupts:

        class Monitor(trt.IProgressMonitor):  # type: ignore[misc]
            def __init__(self) -> None:
                trt.IProgressMonitor.__init__(self)

            def phase_start(self, name: str, parent: str | None, num_steps: int) -> None:
                pass

            def step_complete(self, name: str, step: int) -> bool:
                return not interrupts.is_pending

            def phase_finish(self, name: str) -> None:
                pass

        settings.progress_monitor = Monitor()
        plan = builder.build_serialized_network(network, settings)
    if plan is None:
        raise BuildError(f"TensorRT can't build the plan: {log.text()}")
    return bytes(plan)
