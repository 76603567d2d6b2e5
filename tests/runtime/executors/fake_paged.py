"""TensorRT without a GPU: what its module has at run time that TensorRT for RTX's hasn't, or has
otherwise. Plugins find the KV pools in the fake GPU's memory."""

from math import prod
from typing import Any

import numpy as np
from fake_tensorrt import Allocation, FakeContext, FakeEngine, FakeRuntime, FakeTensorRT, ILogger
from numpy.typing import NDArray


class FakePagedTensorRT(FakeTensorRT):
    """The module."""

    __version__ = "11.4.0.106"

    def Runtime(self, logger: ILogger) -> "FakePagedRuntime":
        assert isinstance(logger, ILogger)
        return FakePagedRuntime(self, logger)


class FakePagedRuntime(FakeRuntime):
    def deserialize_cuda_engine(self, serialized_engine: Any) -> "FakePagedEngine | None":
        assert bytes(serialized_engine[:]) == b"plan"
        return None if self._refuses() else FakePagedEngine(self.trt)


class FakePagedEngine(FakeEngine):
    def create_runtime_config(self) -> Any:
        raise AssertionError("nothing that it has is needed")

    def create_execution_context(self, strategy: Allocation) -> "FakePagedContext | None":  # type: ignore[override]
        assert strategy is Allocation.USER_MANAGED
        if self.trt.broken == "context":
            return None
        made = FakePagedContext(self)
        self.trt.contexts.append(made)
        return made


class FakePagedContext(FakeContext):
    def is_stream_capturable(self, stream: int) -> bool:
        raise AssertionError("TensorRT for RTX alone has this")

    def _feed(self, name: str, address: int, shape: tuple[int, ...]) -> NDArray[Any]:
        given = super()._feed(name, address, shape)
        if not name.startswith("pool."):
            return given
        on_gpu = self.gpu.view(int(given[0]), prod(shape))
        return np.array([on_gpu.ctypes.data], np.int64)
