"""A GPU that isn't there: stands for cuda.bindings.driver, and runs launches in Triton's
interpreter, from the very arguments that a GPU would be given. A module's code is its kernel's
name."""

import ctypes
from collections import Counter
from collections.abc import Mapping
from enum import IntEnum
from typing import Any

import numpy as np
import torch

from bench.gpu.case import TORCH_TYPES
from llmbuild.builder.targets.gpu.triton_compiler import launch_arguments
from llmbuild.plugins.common.kernel_variant import KernelVariant

STREAM = 5
ELAPSED_MS = 0.5  # of whatever is timed
MEMORY_BYTES = 1 << 30
_INTEGERS = {"i32": ctypes.c_int32, "i64": ctypes.c_int64}


class CUresult(IntEnum):
    CUDA_SUCCESS = 0
    CUDA_ERROR_INVALID_VALUE = 1
    CUDA_ERROR_NO_DEVICE = 100


class CUdevice_attribute(IntEnum):
    CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT = 16
    CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR = 75
    CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR = 76


class CUfunction_attribute(IntEnum):
    CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES = 8


class CUstream_flags(IntEnum):
    CU_STREAM_NON_BLOCKING = 1


class CUstreamCaptureMode(IntEnum):
    CU_STREAM_CAPTURE_MODE_THREAD_LOCAL = 1


class FakeDriver:
    """variants: by name, those that may be launched. sm: of the GPU."""

    CUresult = CUresult
    CUdevice_attribute = CUdevice_attribute
    CUfunction_attribute = CUfunction_attribute
    CUstream_flags = CUstream_flags
    CUstreamCaptureMode = CUstreamCaptureMode

    def __init__(self, variants: Mapping[str, KernelVariant] | None = None, sm: int = 89) -> None:
        self.variants = dict(variants or {})
        self.sm = sm
        self.failing: dict[str, CUresult] = {}
        self.calls: Counter[str] = Counter()
        self.memory: dict[int, Any] = {}
        self.shared_allowed: dict[str, int] = {}
        self.recorded: list[str] | None = None  # what a capture has, by name
        self.graphs: list[int] = []  # how many launches each graph has had

    def __getattribute__(self, name: str) -> Any:
        found = super().__getattribute__(name)
        if not name.startswith("cu") or name == "cuGetErrorName":
            return found

        def call(*arguments: Any) -> tuple[Any, ...]:
            self.calls[name] += 1
            if name in self.failing:
                return self.failing[name], None
            result = found(*arguments)
            return (CUresult.CUDA_SUCCESS, *(result if isinstance(result, tuple) else (result,)))

        return call if callable(found) else found

    def cuGetErrorName(self, status: CUresult) -> tuple[CUresult, bytes]:
        return CUresult.CUDA_SUCCESS, status.name.encode()

    def cuInit(self, flags: int) -> None: ...

    def cuDeviceGet(self, ordinal: int) -> int:
        return ordinal

    def cuDeviceGetAttribute(self, attribute: CUdevice_attribute, device: int) -> int:
        major, minor = divmod(self.sm, 10)
        known = {16: 8, 75: major, 76: minor}
        return known[int(attribute)]

    def cuDeviceGetName(self, length: int, device: int) -> bytes:
        return b"Fake GPU".ljust(length, b"\0")

    def cuDevicePrimaryCtxRetain(self, device: int) -> int:
        return 1

    def cuCtxSetCurrent(self, context: int) -> None:
        assert context == 1

    def cuStreamCreate(self, flags: int) -> int:
        return STREAM

    def cuEventCreate(self, flags: int) -> int:
        return 0

    def cuMemGetInfo(self) -> tuple[int, int]:
        used = sum(map(len, self.memory.values()))
        return MEMORY_BYTES - used, MEMORY_BYTES

    def cuMemAlloc(self, size: int) -> int:
        memory = (ctypes.c_uint8 * (size + 256))()
        address = -(-ctypes.addressof(memory) // 256) * 256
        self.memory[address] = memory
        return address

    def cuMemFree(self, address: int) -> None:
        del self.memory[address]

    def cuMemcpyHtoD(self, target: int, source: bytes, size: int) -> None:
        assert len(source) >= size
        self._bytes(target, size)[:] = np.frombuffer(source, np.uint8, size)

    def cuMemcpyDtoH(self, target: bytearray, source: int, size: int) -> None:
        target[:] = self._bytes(source, size).tobytes()

    def cuMemcpyDtoDAsync(self, target: int, source: int, size: int, stream: int) -> None:
        assert stream == STREAM
        if self.recorded is not None:
            self.recorded.append("copy")
            return
        self._bytes(target, size)[:] = self._bytes(source, size)

    def cuModuleLoadData(self, image: bytes) -> str:
        return image.decode()

    def cuModuleGetFunction(self, module: str, name: bytes) -> str:
        assert self.variants[module].kernel.__name__ == name.decode()  # type: ignore[attr-defined]
        return module

    def cuFuncSetAttribute(self, function: str, attribute: int, value: int) -> None:
        assert attribute == CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        self.shared_allowed[function] = value

    def cuLaunchKernel(self, function: str, *arguments: int) -> None:
        *shape, shared, stream, parameters, extra = arguments
        assert stream == STREAM
        assert extra == 0
        assert shared <= self.shared_allowed.get(function, 48 * 1024)
        assert all(size >= 1 for size in shape)
        assert shape[1] <= 65535
        assert shape[2] <= 65535
        assert shape[3] % 32 == 0
        assert shape[4:] == [1, 1]
        variant = self.variants[function]
        values = self._values(variant, parameters)
        if self.recorded is not None:
            self.recorded.append(function)
            return
        variant.kernel[tuple(shape[:3])](**values, **variant.constants)

    def cuStreamSynchronize(self, stream: int) -> None: ...

    def cuStreamBeginCapture(self, stream: int, mode: int) -> None:
        self.recorded = []

    def cuStreamEndCapture(self, stream: int) -> int:
        assert self.recorded is not None
        self.graphs.append(len(self.recorded))
        self.recorded = None
        return len(self.graphs)

    def cuGraphInstantiate(self, graph: int, flags: int) -> int:
        return graph

    def cuGraphLaunch(self, graph: int, stream: int) -> None: ...

    def cuGraphExecDestroy(self, graph: int) -> None: ...

    def cuGraphDestroy(self, graph: int) -> None: ...

    def cuEventRecord(self, event: int, stream: int) -> None: ...

    def cuEventSynchronize(self, event: int) -> None: ...

    def cuEventElapsedTime(self, begin: int, end: int) -> float:
        return ELAPSED_MS

    def _values(self, variant: KernelVariant, parameters: int) -> dict[str, Any]:
        """What a kernel would read of its parameters."""
        arguments = launch_arguments(variant)
        pointers = (ctypes.c_void_p * (len(arguments) + 2)).from_address(parameters)
        values: dict[str, Any] = {}
        for (name, kind), pointer in zip(arguments, pointers, strict=False):
            assert pointer is not None
            if kind.startswith("*"):
                address = ctypes.c_void_p.from_address(pointer).value
                assert address is not None
                values[name] = self._tensor(address, TORCH_TYPES[kind])
            else:
                values[name] = _INTEGERS[kind].from_address(pointer).value
        for pointer in pointers[len(arguments) :]:  # Triton's scratch
            assert pointer is not None
            assert ctypes.c_void_p.from_address(pointer).value is None
        return values

    def _tensor(self, address: int, dtype: torch.dtype) -> torch.Tensor:
        """From an allocation's begin to its end."""
        size = len(self.memory[address]) - 256
        return torch.from_numpy(self._bytes(address, size // dtype.itemsize * dtype.itemsize)).view(
            dtype
        )

    def _bytes(self, address: int, size: int) -> Any:
        for base, memory in self.memory.items():
            if base <= address and address + size <= base + len(memory) - 256:
                return np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(address))
        raise AssertionError(f"{size} bytes at {address:#x} aren't the GPU's")
