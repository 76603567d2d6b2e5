"""A plan of TensorRT for RTX on the GPU, and contexts that run it."""

import mmap
import os
import tempfile
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from llmbuild.errors import EngineError
from llmbuild.runtime.executors.cuda import Cuda
from llmbuild.runtime.target import ALIGNMENT_BYTES, PlanTensor
from llmbuild.runtime.tensorrt_log import CollectedLog

CONTEXT, DECODE = 0, 1  # the optimisation profiles that every plan is built with


def load_tensorrt() -> Any:
    """The module. Raises EngineError where it isn't installed."""
    try:
        return import_module("tensorrt_rtx")
    except ImportError as error:
        raise EngineError(
            f"the engine needs TensorRT for RTX, which can't be imported ({error}): "
            "`pip install '.[tensorrt-rtx]'` in llmbuild's checkout has it"
        ) from error


class Plan:
    """TensorRT's engine. Contexts are made of it, which share their scratch memory: they may only
    run one after the other.

    cache: where kernels that TensorRT compiles for this GPU are kept for the next time.
    """

    def __init__(
        self, path: Path, tensors: Sequence[PlanTensor], cuda: Cuda, cache: Path | None
    ) -> None:
        """Raises EngineError when the plan can't be loaded, or hasn't these inputs and outputs."""
        self._trt = trt = load_tensorrt()
        self._cuda, self._path, self._cache_path = cuda, path, cache
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
        config = self._engine.create_runtime_config()
        self._cache = config.create_runtime_cache()
        self._cached = _read(cache)
        if self._cached:  # of another driver or GPU it is refused, and made anew
            self._cache.deserialize(self._cached)
        self._scratch = 0

    def take_scratch(self) -> None:
        """Take the contexts' scratch memory. Raises EngineError where there isn't enough."""
        size = self._engine.device_memory_size_v2
        self._scratch = self._cuda.allocate(size, "activations") if size else 0

    def make_context(self, profile: int) -> "PlanContext":
        """For executions of a profile. Of decode, whose shapes are few, each shape's kernels are
        compiled before it runs, so that a graph has them; of others as they come, in the
        background."""
        trt, config = self._trt, self._engine.create_runtime_config()
        strategies = trt.DynamicShapesKernelSpecializationStrategy
        config.dynamic_shapes_kernel_specialization_strategy = (
            strategies.EAGER if profile == DECODE else strategies.LAZY
        )
        managed = trt.ExecutionContextAllocationStrategy.USER_MANAGED
        config.set_execution_context_allocation_strategy(managed)
        config.set_runtime_cache(self._cache)
        context = self._engine.create_execution_context(runtime_config=config)
        if context is None:
            raise self.error("gives no execution context")
        context.set_device_memory(self._scratch, self._engine.device_memory_size_v2)
        made = PlanContext(self, context, self._cuda.stream)
        made.check(
            context.set_optimization_profile_async(profile, self._cuda.stream),
            f"has no optimisation profile {profile}",
        )
        return made

    def error(self, what: str) -> EngineError:
        return EngineError(f"{self._path} {what}: {self._log.text()}")

    def close(self) -> None:
        """Give its memory back; its contexts are gone."""
        self._keep_cache()
        self._cache = self._engine = self._runtime = None
        if self._scratch:
            self._cuda.free(self._scratch)
            self._scratch = 0

    def _keep_cache(self) -> None:
        """Leave what was compiled for the next time, if that can be."""
        path, memory = self._cache_path, self._cache.serialize()
        content = b"" if memory is None else bytes(memory)
        if path is None or content in (b"", self._cached):
            return
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=path.parent) as staging:
                part = Path(staging) / path.name
                part.write_bytes(content)
                os.replace(part, path)
        except OSError:
            pass


class PlanContext:
    """Executions of a plan, one after the other. As a graph keeps what it was recorded with, a
    context that has one is never bound anew."""

    def __init__(self, plan: Plan, context: Any, stream: int) -> None:
        self._plan, self._context, self._stream = plan, context, stream

    def bind(self, shapes: Mapping[str, tuple[int, ...]], addresses: Mapping[str, int]) -> None:
        """shapes: of all inputs. addresses: of inputs and outputs."""
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
        return bool(self._context.is_stream_capturable(self._stream))

    def enqueue(self) -> None:
        """Put an execution of what is bound into the stream."""
        self.check(self._context.execute_async_v3(self._stream), "can't be executed")

    def check(self, is_right: bool, what: str) -> None:
        if not is_right:
            raise self._plan.error(what)


def _read(path: Path | None) -> bytes:
    if path is None:
        return b""
    try:
        return path.read_bytes()
    except OSError:
        return b""
