"""TensorRT for RTX without a GPU: stands for its module at run time. Its engine is an emulated
network on the fake GPU's memory, and its contexts hold their callers to TensorRT's rules."""

from collections.abc import Iterator, Mapping
from enum import Enum
from math import prod
from typing import Any

import ml_dtypes
import numpy as np
from fake_cuda import STREAM, FakeCuda
from numpy.typing import NDArray

from llmbuild.builder.targets.tensorrt.emulation.emulate import Emulated
from llmbuild.builder.targets.tensorrt.profiles import Range

DTYPES = {
    "int32": np.dtype(np.int32),
    "int64": np.dtype(np.int64),
    "fp32": np.dtype(np.float32),
    "fp16": np.dtype(np.float16),
    "bf16": np.dtype(ml_dtypes.bfloat16),
}
SCRATCH_BYTES = 12_345
UPDATED = ".updated"


class Specialization(Enum):
    LAZY = 0
    EAGER = 1
    NONE = 2


class Allocation(Enum):
    STATIC = 0
    USER_MANAGED = 2


class Severity(Enum):
    INTERNAL_ERROR = 0
    ERROR = 1
    WARNING = 2


class ILogger:
    Severity = Severity

    def log(self, severity: Severity, message: str) -> None:
        raise NotImplementedError


class FakeTensorRT:
    """The module. profiles: of its plan. is_capturable: whether the engine's contexts can be
    recorded. broken: what fails from now on: "deserialize", "context" or "execute"."""

    ILogger = ILogger
    DynamicShapesKernelSpecializationStrategy = Specialization
    ExecutionContextAllocationStrategy = Allocation

    def __init__(self, gpu: FakeCuda, emulated: Emulated, profiles: list[dict[str, Range]]) -> None:
        self.gpu, self.emulated, self.profiles = gpu, emulated, profiles
        self.is_capturable = True
        self.broken = ""
        self.contexts: list[FakeContext] = []
        self.compiled: list[tuple[int, ...]] = []  # token shapes, as their kernels are made
        self.loaded_cache = b""

    def Runtime(self, logger: ILogger) -> "FakeRuntime":
        assert isinstance(logger, ILogger)
        return FakeRuntime(self, logger)


class FakeRuntime:
    def __init__(self, trt: FakeTensorRT, logger: ILogger) -> None:
        self.trt, self.logger = trt, logger

    def deserialize_cuda_engine(self, serialized_engine: Any) -> "FakeEngine | None":
        assert bytes(serialized_engine[:4]) == b"vtrt"
        return None if self._refuses() else FakeEngine(self.trt)

    def _refuses(self) -> bool:
        if self.trt.broken != "deserialize":
            return False
        self.logger.log(Severity.WARNING, "a warning")
        self.logger.log(Severity.ERROR, "the plan is for another GPU")
        return True


class FakeCache:
    """A runtime cache whose content tells which shapes have kernels."""

    def __init__(self, trt: FakeTensorRT) -> None:
        self.trt = trt

    def deserialize(self, blob: bytes) -> bool:
        self.trt.loaded_cache = bytes(blob)
        return True

    def serialize(self) -> bytes:
        return repr(self.trt.compiled).encode()


class FakeConfig:
    def __init__(self, trt: FakeTensorRT) -> None:
        self.trt = trt
        self.dynamic_shapes_kernel_specialization_strategy = Specialization.LAZY
        self.allocation = Allocation.STATIC
        self.cache: FakeCache | None = None

    def create_runtime_cache(self) -> FakeCache:
        return FakeCache(self.trt)

    def set_runtime_cache(self, cache: FakeCache) -> bool:
        self.cache = cache
        return True

    def set_execution_context_allocation_strategy(self, strategy: Allocation) -> None:
        self.allocation = strategy


class FakeEngine:
    device_memory_size_v2 = SCRATCH_BYTES

    def __init__(self, trt: FakeTensorRT) -> None:
        self.trt = trt
        network = trt.emulated.network
        self.inputs, self.outputs = network.inputs, network.outputs
        self._names = [*self.inputs, *self.outputs]
        self.num_io_tensors = len(self._names)

    def get_tensor_name(self, index: int) -> str:
        return self._names[index]

    def create_runtime_config(self) -> FakeConfig:
        return FakeConfig(self.trt)

    def create_execution_context(self, *, runtime_config: FakeConfig) -> "FakeContext | None":
        if self.trt.broken == "context":
            return None
        assert runtime_config.allocation is Allocation.USER_MANAGED
        assert runtime_config.cache is not None
        made = FakeContext(self, runtime_config.dynamic_shapes_kernel_specialization_strategy)
        self.trt.contexts.append(made)
        return made


class FakeContext:
    def __init__(self, engine: FakeEngine, specialization: Specialization | None = None) -> None:
        self.engine, self.trt, self.gpu = engine, engine.trt, engine.trt.gpu
        self.specialization = specialization
        self.profile: Mapping[str, Range] = {}
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.addresses: dict[str, int] = {}
        self.scratch = 0
        self.ran: dict[str, tuple[int, ...]] | None = None  # the shapes of the last execution
        self.recorded: object = None  # what a graph of it was recorded with
        self.communicator: object = None

    def set_device_memory(self, memory: int, size: int) -> None:
        assert memory % 256 == 0
        assert size >= SCRATCH_BYTES
        self.gpu.view(memory, size)
        self.scratch = memory

    def set_communicator(self, communicator: object) -> bool:
        self.communicator = communicator
        return True

    def set_optimization_profile_async(self, profile_index: int, stream_handle: int) -> bool:
        assert stream_handle == STREAM
        self.profile = self.trt.profiles[profile_index]
        if self.specialization is not None:
            eager = self.specialization is Specialization.EAGER
            assert eager == (profile_index == 1), "a graph is of kernels made for its shapes"
        return True

    def set_input_shape(self, name: str, shape: tuple[int, ...]) -> bool:
        sizes = self.profile[name]
        bounds = zip(sizes.least, shape, sizes.most, strict=True)
        if not all(least <= size <= most for least, size, most in bounds):
            return False
        self.shapes[name] = shape
        return True

    def set_tensor_address(self, name: str, memory: int) -> bool:
        assert memory % 256 == 0, f"{name} isn't aligned"
        assert name in (*self.engine.inputs, *self.engine.outputs)
        self.addresses[name] = memory
        return True

    def infer_shapes(self) -> list[str]:
        dynamic = {name for name, each in self.engine.inputs.items() if -1 in each.shape}
        return sorted(dynamic - {*self.shapes})

    def is_stream_capturable(self, stream: int) -> bool:
        return stream == STREAM and self.trt.is_capturable

    def execute_async_v3(self, stream_handle: int) -> bool:
        assert stream_handle == STREAM
        if self.trt.broken == "execute":
            return False
        assert self.scratch
        assert {*self.addresses} == {*self.engine.inputs, *self.engine.outputs}
        bound = dict(self.shapes), dict(self.addresses)
        for name, address in self.addresses.items():
            if name.endswith(UPDATED):
                assert address == self.addresses[name.removesuffix(UPDATED)]
        if self.gpu.recording is None:
            assert self.recorded is None, "a context that has a graph is only launched"
            if self.shapes["token_ids"] not in self.trt.compiled:
                self.trt.compiled.append(self.shapes["token_ids"])
            self.ran = bound[0]
        else:
            assert self.ran == bound[0], "a shape runs once before it is recorded"
            self.recorded = bound
        self.gpu.submit(lambda: self._execute(*bound))
        return True

    def _execute(self, shapes: Mapping[str, tuple[int, ...]], addresses: Mapping[str, int]) -> None:
        assert self.recorded in (None, (shapes, addresses)), "a graph's context was bound anew"
        assert shapes["positions"] == shapes["token_ids"]
        feeds = {
            name: self._feed(name, addresses[name], shapes.get(name, tensor.shape)).copy()
            for name, tensor in self.engine.inputs.items()
        }
        for name, values in self.trt.emulated.run(feeds).items():
            target = self._array(addresses[name], values.shape, str(_dtype_name(values)))
            target[...] = values

    def _feed(self, name: str, address: int, shape: tuple[int, ...]) -> NDArray[Any]:
        return self._array(address, shape, self.engine.inputs[name].dtype.value)

    def _array(self, address: int, shape: tuple[int, ...], dtype: str) -> NDArray[Any]:
        size = prod(shape) * DTYPES[dtype].itemsize
        return self.gpu.view(address, size).view(DTYPES[dtype]).reshape(shape)


def _dtype_name(values: NDArray[Any]) -> str:
    return next(name for name, dtype in DTYPES.items() if dtype == values.dtype)


def methods(kind: type) -> Iterator[str]:
    """What a fake lets its callers use, for comparison with the real one."""
    return (name for name in vars(kind) if not name.startswith("_"))
