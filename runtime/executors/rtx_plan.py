"""A plan of TensorRT for RTX, which compiles kernels for the GPU at hand as it goes."""

import os
import tempfile
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from llmbuild.errors import EngineError
from llmbuild.runtime.executors.cuda import Cuda
from llmbuild.runtime.executors.plan import DECODE, Plan
from llmbuild.runtime.target import PlanTensor


def load_tensorrt() -> Any:
    """The module. Raises EngineError where it isn't installed."""
    try:
        return import_module("tensorrt_rtx")
    except ImportError as error:
        raise EngineError(
            f"the engine needs TensorRT for RTX, which can't be imported ({error}): "
            "`pip install '.[tensorrt-rtx]'` in llmbuild's checkout has it"
        ) from error


class RtxPlan(Plan):
    """cache: where kernels that TensorRT compiles for this GPU are kept for the next time."""

    def __init__(
        self, path: Path, tensors: Sequence[PlanTensor], cuda: Cuda, cache: Path | None
    ) -> None:
        super().__init__(load_tensorrt(), path, tensors, cuda)
        self._cache_path = cache
        self._cache = self._engine.create_runtime_config().create_runtime_cache()
        self._cached = _read(cache)
        if self._cached:  # of another driver or GPU it is refused, and made anew
            self._cache.deserialize(self._cached)

    def _new_context(self, profile: int) -> Any:
        """Of decode, whose shapes are few, each shape's kernels are compiled before it runs, so
        that a graph has them; of others as they come, in the background."""
        trt, config = self._trt, self._engine.create_runtime_config()
        strategies = trt.DynamicShapesKernelSpecializationStrategy
        config.dynamic_shapes_kernel_specialization_strategy = (
            strategies.EAGER if profile == DECODE else strategies.LAZY
        )
        managed = trt.ExecutionContextAllocationStrategy.USER_MANAGED
        config.set_execution_context_allocation_strategy(managed)
        config.set_runtime_cache(self._cache)
        return self._engine.create_execution_context(runtime_config=config)

    def is_capturable(self, context: Any) -> bool:
        return bool(context.is_stream_capturable(self._cuda.stream))

    def close(self) -> None:
        self._keep_cache()
        self._cache = None
        super().close()

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


def _read(path: Path | None) -> bytes:
    if path is None:
        return b""
    try:
        return path.read_bytes()
    except OSError:
        return b""
