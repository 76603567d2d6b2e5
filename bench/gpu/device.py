"""The GPU at hand through cuda-python's driver API: memory, kernels, and times by events."""

import ctypes
from collections.abc import Callable
from importlib import import_module
from typing import Any

from bench.gpu.arguments import Packed
from llmbuild.builder.targets.gpu.capabilities import CAPABILITIES, WARP_THREADS
from llmbuild.builder.targets.gpu.compiled_kernel import CompiledKernel
from llmbuild.builder.targets.gpu.gates import SHARED_LIMIT_BYTES
from llmbuild.errors import UserError

DRIVER = "libcuda.so.1"


def load_bindings() -> Any:
    """The module of the driver's API. Raises UserError for what is missing, in one line."""
    try:
        driver = import_module("cuda.bindings.driver")
    except ImportError as error:
        raise UserError(
            f"cuda-python 13 is missing ({error}): pip install 'cuda-python>=13'"
        ) from (error)
    try:
        ctypes.CDLL(DRIVER)
    except OSError as error:
        raise UserError(f"an NVIDIA GPU and its driver are needed; {DRIVER} isn't here") from error
    return driver


class Gpu:
    """The first GPU, its primary context, which torch uses as well, and a stream of our own."""

    def __init__(self) -> None:
        """Raises UserError where there is none, or none that kernels are built for."""
        self._driver = driver = load_bindings()
        self._call("cuInit", 0)
        self._device = self._call("cuDeviceGet", 0)
        attributes = driver.CUdevice_attribute
        major, minor, self.num_sms = (
            self._call("cuDeviceGetAttribute", getattr(attributes, name), self._device)
            for name in (
                "CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR",
                "CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR",
                "CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT",
            )
        )
        self.sm = 10 * major + minor
        self.name = self._call("cuDeviceGetName", 128, self._device).rstrip(b"\0").decode()
        if self.sm not in CAPABILITIES:
            known = ", ".join(map(str, CAPABILITIES))
            raise UserError(f"{self.name} is SM {self.sm}, and kernels are built for SM {known}")
        self._call("cuCtxSetCurrent", self._call("cuDevicePrimaryCtxRetain", self._device))
        flags = int(driver.CUstream_flags.CU_STREAM_NON_BLOCKING)
        self._stream = self._call("cuStreamCreate", flags)
        self._events = [self._call("cuEventCreate", 0) for _ in range(2)]

    # Memory

    def free_bytes(self) -> int:
        return int(self._call("cuMemGetInfo")[0])

    def allocate(self, size: int) -> int:
        return int(self._call("cuMemAlloc", max(size, 1)))

    def free(self, address: int) -> None:
        self._call("cuMemFree", address)

    def fill(self, address: int, size: int, pattern: bytes) -> None:
        """Memory with a pattern again and again: copied once, then doubled where it lies."""
        done = min(len(pattern), size)
        self._call("cuMemcpyHtoD", address, pattern, done)
        while done < size:
            count = min(done, size - done)
            self._call("cuMemcpyDtoDAsync", address + done, address, count, self._stream)
            done += count
        self._call("cuStreamSynchronize", self._stream)

    def read(self, address: int, size: int) -> bytes:
        content = bytearray(size)
        self._call("cuMemcpyDtoH", content, address, size)
        return bytes(content)

    def copy(self, target: int, source: int, size: int) -> None:
        """Within the GPU's memory; on the stream."""
        self._call("cuMemcpyDtoDAsync", target, source, size, self._stream)

    # Kernels

    def load(self, kernel: CompiledKernel) -> Any:
        """The function of a cubin, allowed the dynamic shared memory that it takes."""
        module = self._call("cuModuleLoadData", kernel.cubin)
        function = self._call("cuModuleGetFunction", module, kernel.entry.encode())
        shared = kernel.resources.shared_bytes
        if shared > SHARED_LIMIT_BYTES:
            attributes = self._driver.CUfunction_attribute
            attribute = attributes.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            self._call("cuFuncSetAttribute", function, attribute, shared)
        return function

    def launch(
        self, function: Any, kernel: CompiledKernel, grid: tuple[int, ...], packed: Packed
    ) -> None:
        """On the stream; packed has to live until it is done."""
        uses = kernel.resources
        blocks = (*grid, 1, 1)[:3]
        threads = (WARP_THREADS * uses.num_warps, 1, 1)
        shape = (*blocks, *threads, uses.shared_bytes)
        self._call("cuLaunchKernel", function, *shape, self._stream, packed.address, 0)

    def synchronise(self) -> None:
        self._call("cuStreamSynchronize", self._stream)

    def time(self, enqueue: Callable[[], None], repeats: int) -> list[float]:
        """Seconds of what `enqueue` puts on the stream, `repeats` times. It is recorded as a graph
        first, so that no time of Python's is in it."""
        driver = self._driver
        mode = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
        self._call("cuStreamBeginCapture", self._stream, mode)
        enqueue()
        recorded = self._call("cuStreamEndCapture", self._stream)
        graph = self._call("cuGraphInstantiate", recorded, 0)
        begin, end = self._events
        seconds = []
        for _ in range(repeats + 1):
            self._call("cuEventRecord", begin, self._stream)
            self._call("cuGraphLaunch", graph, self._stream)
            self._call("cuEventRecord", end, self._stream)
            self._call("cuEventSynchronize", end)
            seconds.append(1e-3 * self._call("cuEventElapsedTime", begin, end))
        self._call("cuGraphExecDestroy", graph)
        self._call("cuGraphDestroy", recorded)
        return seconds[1:]  # the first warms up

    def _call(self, name: str, *arguments: Any) -> Any:
        status, *results = getattr(self._driver, name)(*arguments)
        if status != self._driver.CUresult.CUDA_SUCCESS:
            _, text = self._driver.cuGetErrorName(status)
            what = text.decode() if isinstance(text, bytes) else str(status)
            raise UserError(f"the GPU's driver refused {name}: {what}")
        return results[0] if len(results) == 1 else results
