"""Runs an engine of the cpu target: native code and mapped weights, through ctypes."""

import ctypes
import mmap
import os
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from llmbuild.errors import EngineError, UserError
from llmbuild.runtime.batch import StepBatch
from llmbuild.runtime.engine import Engine
from llmbuild.runtime.manifest import step_shape

ABI = "llmbuild-cpu-2"

_Int32Pointer = ctypes.POINTER(ctypes.c_int32)
_ARRAYS = ("token_ids", "positions", "query_start", "kv_lengths", "block_tables", "logit_rows")


class _Step(ctypes.Structure):
    """plugins/common/step.h, field for field."""

    _fields_ = (
        ("num_tokens", ctypes.c_int),
        ("num_sequences", ctypes.c_int),
        ("num_logit_rows", ctypes.c_int),
        ("max_blocks_per_sequence", ctypes.c_int),
        *((name, _Int32Pointer) for name in _ARRAYS),
    )


class CpuExecutor:
    """One loaded engine with its KV pools and its thread team; one step at a time.

    num_blocks: of every layer's pools, the scratch block included. num_threads: size of the
    team, of which the calling thread is one. pin_threads: thread i stays on the i-th processor
    that this process may use, the calling one included. Raises EngineError when the executable
    isn't what the manifest describes, or memory can't be had.
    """

    def __init__(
        self, engine: Engine, num_blocks: int, num_threads: int, pin_threads: bool = False
    ) -> None:
        manifest, rank = engine.manifest, engine.manifest.ranks[0]
        self.vocab_size = manifest.vocab_size
        self.num_blocks = num_blocks
        self.kv_bytes = num_blocks * manifest.kv.block_bytes
        self._handle: int | None = None
        self._process = os.getpid()
        self._library = _load(engine.root / rank.executables[engine.isa_level])
        shape = step_shape(manifest.limits, manifest.kv, manifest.vocab_size, rank.arena_bytes)
        compiled = self._library.llmbuild_step_shape().decode()
        if compiled != shape:
            raise EngineError(
                f"{rank.executables[engine.isa_level]} was compiled for {compiled}, and the "
                f"manifest says {shape}; compile the model again"
            )
        self._weights = _map_weights(engine.root / rank.weights)
        expected = self._library.llmbuild_weights_bytes()
        if expected != len(self._weights):
            raise EngineError(
                f"{rank.weights} holds {len(self._weights)} bytes of weights and the executable "
                f"reads {expected}; compile the model again"
            )
        try:
            self._kv = np.frombuffer(mmap.mmap(-1, max(self.kv_bytes, 1)), np.uint8)
        except (OSError, OverflowError) as error:
            raise EngineError(
                f"can't have {self.kv_bytes} bytes for the KV cache: {error}; give less kv_memory"
            ) from error
        self._handle = self._library.llmbuild_create(
            self._weights.ctypes.data, self._kv.ctypes.data, num_blocks, num_threads, pin_threads
        )
        if self._handle is None:
            raise EngineError(
                f"can't start {num_threads} threads with {rank.arena_bytes} bytes of activations; "
                "give fewer threads, or compile with a smaller limits.max_step_tokens"
            )

    def step(self, batch: StepBatch) -> NDArray[np.float32]:
        """Logits [R, vocab] of one step; the KV pools move forward. The GIL is free meanwhile."""
        assert self._handle is not None, "the executor is closed"
        if self._process != os.getpid():  # a fork has none of the team's threads
            raise UserError("the engine was opened before this process was forked; open it here")
        arrays = {name: getattr(batch, name) for name in _ARRAYS}
        assert all(a.dtype == np.int32 and a.flags.c_contiguous for a in arrays.values())
        logits = np.empty((len(batch.logit_rows), self.vocab_size), np.float32)
        step = _Step(
            num_tokens=batch.num_tokens,
            num_sequences=batch.num_sequences,
            num_logit_rows=len(batch.logit_rows),
            max_blocks_per_sequence=batch.block_tables.shape[1],
            **{name: array.ctypes.data_as(_Int32Pointer) for name, array in arrays.items()},
        )
        status = self._library.llmbuild_step(
            self._handle, ctypes.byref(step), logits.ctypes.data_as(ctypes.c_void_p)
        )
        assert status == 0, "the step is larger than the engine's limits"
        return logits

    def close(self) -> None:
        """Stop the threads and free the activations. Closing twice is allowed."""
        if self._handle is not None:
            if self._process == os.getpid():  # a fork would wait for threads that it hasn't
                self._library.llmbuild_destroy(self._handle)
            self._handle = None

    def __del__(self) -> None:
        self.close()


def _load(path: Path) -> ctypes.CDLL:
    try:
        library = ctypes.CDLL(str(path))
        library.llmbuild_abi.restype = ctypes.c_char_p
        abi = library.llmbuild_abi().decode()
    except (OSError, AttributeError) as error:
        raise EngineError(f"{path} can't be loaded: {error}; compile the model again") from error
    if abi != ABI:
        raise EngineError(
            f"{path} speaks {abi} and this runtime {ABI}; compile the model with this llmbuild"
        )
    library.llmbuild_step_shape.restype = ctypes.c_char_p
    library.llmbuild_weights_bytes.restype = ctypes.c_int64
    library.llmbuild_create.restype = ctypes.c_void_p
    library.llmbuild_create.argtypes = (
        ctypes.c_void_p,
        ctypes.c_void_p,
        ctypes.c_int64,
        ctypes.c_int,
        ctypes.c_int,
    )
    library.llmbuild_destroy.argtypes = (ctypes.c_void_p,)
    library.llmbuild_step.argtypes = (ctypes.c_void_p, ctypes.POINTER(_Step), ctypes.c_void_p)
    return library


def _map_weights(path: Path) -> NDArray[np.uint8]:
    """The data of a safetensors file, mapped: pages are read when a kernel first needs them."""
    try:
        with path.open("rb") as file:
            mapped = np.frombuffer(mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ), np.uint8)
    except (OSError, ValueError) as error:  # ValueError: the file is empty
        raise EngineError(f"{path} can't be mapped: {error}; compile the model again") from error
    begin = 8 + int.from_bytes(mapped[:8].tobytes(), "little")
    return mapped[begin:]
