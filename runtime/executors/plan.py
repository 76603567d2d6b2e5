"""A plan on the GPU, and contexts that run it; of TensorRT or TensorRT for RTX."""

import mmap
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from llmbuild.errors import EngineError
from llmbuild.runtime.executors.cuda import Cuda
from llmbuild.runtime.executors.nccl import Communicator
from llmbuild.runtime.target import ALIGNMENT_BYTES, PlanTensor
from llmbuild.runtime.tensorrt_log import CollectedLog

CONTEXT, DECODE = 0, 1  # the optimisation profiles that every plan is built with


class Plan(ABC):
    """TensorRT's engine. Contexts are made of it, which share their scratch memory: they may only
    run one after the other. trt: the module that runs it. communicator: of a rank that shares
    layers with others, to be set before contexts are made; all ranks make theirs together then."""

    def __init__(self, trt: Any, path: Path, tensors: Sequence[PlanTensor], cuda: Cuda) -> None:
        """Raises EngineError when the plan can't be loaded, or hasn't these inputs and outputs."""
        self._trt, self._cuda, self._path = trt, cuda, path
        self._log = CollectedLog(trt)
        self._runtime = trt.Runtime(self._log.logger)
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as plan:
            self._engine = self._runtime.deserialize_cuda_engine(plan)
        if self._engine is None:
            raise self.error("can't be loaded")
        names = [self._engine.get_tensor_name(i) for i in range(self._engine.num_io_tensors)]
        if sorted(names) != sorted(tensor.name for tensor in tensors):
            raise EngineError(
                f"{path} has inputs and outputs {', '.join(sorted(names))}, which aren't those of "
                "the manifest; compile the model again"
            )
        self._scratch = 0
        self.communicator: Communicator | None = None

    def take_scratch(self) -> None:
        """Take the contexts' scratch memory. Raises EngineError where there isn't enough."""
        size = self._engine.device_memory_size_v2
        self._scratch = self._cuda.allocate(size, "activations") if size else 0

    def make_context(self, profile: int) -> "PlanContext":
        """For executions of a profile."""
        context = self._new_context(profile)
        if context is None:
            raise self.error("gives no execution context")
        context.set_device_memory(self._scratch, self._engine.device_memory_size_v2)
        made = PlanContext(self, context, self._cuda.stream)
        if self.communicator is not None:
            is_set = context.set_communicator(self.communicator.capsule)
            made.check(is_set, "takes no communicator")
        made.check(
            context.set_optimization_profile_async(profile, self._cuda.stream),
            f"has no optimisation profile {profile}",
        )
        return made

    @abstractmethod
    def _new_context(self, profile: int) -> Any:
        """TensorRT's, whose scratch memory is given to it; None where it fails."""

    def is_capturable(self, context: Any) -> bool:
        """Whether what one of its contexts does can be recorded."""
        return True

    def error(self, what: str) -> EngineError:
        return EngineError(f"{self._path} {what}: {self._log.text()}")

    def close(self) -> None:
        """Give its memory back; its contexts are gone."""
        self._engine = self._runtime = None
        if self._scratch:
            self._cuda.free(self._scratch)
            self._scratch = 0


class PlanContext:
    """Executions of a plan, one after the other. As a graph keeps what it was recorded with, a
    context that has one is never bound anew."""

    def __init__(self, plan: Plan, context: Any, stream: int) -> None:
        self._plan, self._context, self._stream = plan, context, stream

    def bind(self, shapes: Mapping[str, tuple[int, ...]], addresses: Mapping[str, int]) -> None:
        """shapes: of all inputs that have several. addresses: of inputs and outputs."""
        for name, shape in shapes.items():
            is_set = self._context.set_input_shape(name, shape)
            self.check(is_set, f"takes no {name} of {list(shape)}")
        for name, address in addresses.items():
            assert address % ALIGNMENT_BYTES == 0, f"{name} lies at {address:#x}"
            self.check(self._context.set_tensor_address(name, address), f"takes no address: {name}")
        unknown = self._context.infer_shapes()
        self.check(not unknown, f"doesn't know the shapes of {', '.join(unknown)}")

    @property
    def is_capturable(self) -> bool:
        return self._plan.is_capturable(self._context)

    def enqueue(self) -> None:
        """Put an execution of what is bound into the stream."""
        self.check(self._context.execute_async_v3(self._stream), "can't be executed")

    def check(self, is_right: bool, what: str) -> None:
        if not is_right:
            raise self._plan.error(what)
