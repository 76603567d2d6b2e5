"""NCCL's communicators, in which the plans of ranks that share layers add up. Untried: no machine
here has a GPU."""

import ctypes
import threading
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from llmbuild.errors import EngineError

_NAME = "libnccl.so.2"
_ID_BYTES = 128  # NCCL_UNIQUE_ID_BYTES

ctypes.pythonapi.PyCapsule_New.restype = ctypes.py_object
ctypes.pythonapi.PyCapsule_New.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]


class _UniqueId(ctypes.Structure):
    _fields_ = (("internal", ctypes.c_char * _ID_BYTES),)


def load_nccl() -> ctypes.CDLL:
    """The library that TensorRT will find, too: of NVIDIA's wheel, or the system's. Raises
    EngineError where there is none."""
    spec = find_spec("nvidia.nccl") if find_spec("nvidia") else None
    folders = spec.submodule_search_locations if spec is not None else None
    wheels = [str(Path(folder) / "lib" / _NAME) for folder in folders or ()]
    for path in (*wheels, _NAME):
        try:
            return ctypes.CDLL(path, mode=ctypes.RTLD_GLOBAL)
        except OSError as error:
            reason = error
    raise EngineError(
        f"ranks on GPUs meet in NCCL, which can't be loaded ({reason}); `pip install '.[nccl]'` in "
        "llmbuild's checkout has it"
    )


def unique_id() -> bytes:
    """What the ranks of a new communicator know each other by."""
    made = _UniqueId()
    nccl = load_nccl()
    _check(nccl, "ncclGetUniqueId", ctypes.byref(made))
    return bytes(memoryview(made))


class Communicator:
    """One rank's end, on the GPU that is set for this thread."""

    def __init__(self, of: bytes, num_ranks: int, rank: int) -> None:
        """Waits until all ranks have come. of: unique_id of one of them."""
        self._nccl = load_nccl()
        self._handle, self._lock = ctypes.c_void_p(), threading.Lock()
        identity = _UniqueId.from_buffer_copy(of)
        _check(
            self._nccl,
            "ncclCommInitRank",
            *(ctypes.byref(self._handle), ctypes.c_int(num_ranks), identity, ctypes.c_int(rank)),
        )

    @property
    def capsule(self) -> object:
        """As TensorRT's contexts take it."""
        return ctypes.pythonapi.PyCapsule_New(self._handle, None, None)

    def abort(self) -> None:
        """End what waits for other ranks, on the GPU as well; may be called by any thread. Nothing
        can be done with it then."""
        self._give_back("ncclCommAbort")

    def close(self) -> None:
        """Give it back; the GPU has ended its work."""
        self._give_back("ncclCommDestroy")

    def _give_back(self, call: str) -> None:
        with self._lock:
            handle, self._handle = self._handle, ctypes.c_void_p()
        if handle:
            getattr(self._nccl, call)(handle)


def _check(nccl: ctypes.CDLL, name: str, *arguments: Any) -> None:
    status = getattr(nccl, name)(*arguments)
    if status != 0:
        nccl.ncclGetErrorString.restype = ctypes.c_char_p
        text = nccl.ncclGetErrorString(status).decode()
        raise EngineError(f"{name} failed: {text}; open the engine again")
