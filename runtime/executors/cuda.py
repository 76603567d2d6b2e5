"""The few CUDA calls that an executor makes, through cuda-python. Every status is checked."""

from importlib import import_module
from typing import Any

from llmbuild.errors import EngineError

_INSTALL = "`pip install '.[tensorrt]'` or '.[tensorrt-rtx]' in llmbuild's checkout has it"


class CudaError(EngineError):
    """A CUDA call that failed."""

    def __init__(self, call: str, name: str, text: str) -> None:
        super().__init__(f"{call} failed: {name}, {text}; open the engine again")
        self.name = name


def load_bindings() -> Any:
    """The module of CUDA's runtime API. Raises EngineError where it isn't installed."""
    try:
        return import_module("cuda.bindings.runtime")
    except ImportError as error:
        raise EngineError(
            f"the engine needs cuda-python 13, which can't be imported ({error}): {_INSTALL}"
        ) from error


class Cuda:
    """A GPU, and one stream of it: all work goes there, in order. Addresses are ints, and so is a
    graph, which is work that was recorded."""

    def __init__(self, device: int = 0) -> None:
        """Raises EngineError where the machine hasn't so many GPUs."""
        self._runtime = load_bindings()
        if device > 0 and device >= (count := int(self._call("cudaGetDeviceCount"))):
            raise EngineError(f"rank {device} needs GPU {device}, and this machine has {count}")
        self._call("cudaSetDevice", device)  # makes the context that TensorRT asks for
        self.stream = int(
            self._call("cudaStreamCreateWithFlags", self._runtime.cudaStreamNonBlocking)
        )

    def close(self) -> None:
        """Give the stream back; nothing may run on it."""
        self._call("cudaStreamDestroy", self.stream)

    # Memory: freshly taken, of the GPU or of the host. The host's is pinned, so that copies from
    # and to it run beside the host's own work, and can be recorded.

    def allocate(self, size_bytes: int, purpose: str) -> int:
        """Raises EngineError, with both numbers, where the GPU hasn't as much."""
        try:
            return int(self._call("cudaMalloc", size_bytes))
        except CudaError as error:
            if error.name != "cudaErrorMemoryAllocation":
                raise
            left_bytes, _ = self._call("cudaMemGetInfo")
            raise EngineError(
                f"the GPU hasn't {size_bytes} bytes for {purpose}, {left_bytes} are left; give "
                "less kv_memory, or compile with smaller limits"
            ) from error

    def free(self, address: int) -> None:
        self._call("cudaFree", address)

    def allocate_host(self, size_bytes: int) -> int:
        return int(self._call("cudaMallocHost", size_bytes))

    def free_host(self, address: int) -> None:
        self._call("cudaFreeHost", address)

    # Work of the stream

    def clear(self, address: int, size_bytes: int) -> None:
        """Fill the GPU's memory with zeros."""
        self._call("cudaMemsetAsync", address, 0, size_bytes, self.stream)

    def copy_to_device(self, target: int, source: int, size_bytes: int) -> None:
        kind = self._runtime.cudaMemcpyKind.cudaMemcpyHostToDevice
        self._call("cudaMemcpyAsync", target, source, size_bytes, kind, self.stream)

    def copy_to_host(self, target: int, source: int, size_bytes: int) -> None:
        kind = self._runtime.cudaMemcpyKind.cudaMemcpyDeviceToHost
        self._call("cudaMemcpyAsync", target, source, size_bytes, kind, self.stream)

    def synchronise(self) -> None:
        """Wait until all work is done. The GIL is free meanwhile."""
        self._call("cudaStreamSynchronize", self.stream)

    # Graphs

    def begin_capture(self) -> None:
        """From here on the stream's work is recorded, not done. Until the end this thread may
        neither take memory nor wait for the stream."""
        mode = self._runtime.cudaStreamCaptureMode.cudaStreamCaptureModeThreadLocal
        self._call("cudaStreamBeginCapture", self.stream, mode)

    def abandon_capture(self) -> None:
        """End it after a failure, which is what counts: this can only fail, too."""
        self._runtime.cudaStreamEndCapture(self.stream)

    def end_capture(self) -> int:
        """The graph of what was recorded."""
        recorded = self._call("cudaStreamEndCapture", self.stream)
        try:
            return int(self._call("cudaGraphInstantiate", recorded, 0))
        finally:
            self._call("cudaGraphDestroy", recorded)

    def launch(self, graph: int) -> None:
        self._call("cudaGraphLaunch", graph, self.stream)

    def destroy_graph(self, graph: int) -> None:
        self._call("cudaGraphExecDestroy", graph)

    def _call(self, name: str, *arguments: Any) -> Any:
        """What the call gives beside its status."""
        status, *results = getattr(self._runtime, name)(*arguments)
        if status != self._runtime.cudaError_t.cudaSuccess:
            raise CudaError(name, *map(self._text_of, ("Name", "String"), (status, status)))
        return results[0] if len(results) == 1 else results

    def _text_of(self, what: str, status: Any) -> str:
        """cudaGetErrorName or cudaGetErrorString of a status."""
        _, text = getattr(self._runtime, f"cudaGetError{what}")(status)
        return bytes(text).decode() if isinstance(text, bytes) else str(text)
