"""Runs an engine of the cpu target: native code and mapped weights, through ctypes."""

import ctypes
import mmap
import os
from array import array
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from llmbuild.errors import EngineError, UserError
from llmbuild.runtime.batch import StepBatch
from llmbuild.runtime.engine import Engine
from llmbuild.runtime.executors.mapped import MappedFile
from llmbuild.runtime.manifest import step_shape

if TYPE_CHECKING:  # greedy serving does without numpy, whose import takes longer than a load
    import numpy as np
    from numpy.typing import NDArray

ABI = "llmbuild-cpu-3"


class CpuExecutor:
    """One loaded engine with its KV pools and its thread team; one step at a time.

    num_blocks: of every layer's pools, the scratch block included. num_threads: size of the
    team, of which the calling thread is one. pin_threads: during a step thread i stays on the
    i-th processor that this process may use, the calling one included. Raises EngineError when
    the executable isn't what the manifest describes, or memory can't be had.
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
        self._weights = _map(engine.root / rank.weights)
        header_bytes = 8 + int.from_bytes(self._weights.first_bytes(8), "little")
        weights_bytes = self._weights.size_bytes - header_bytes
        expected = self._library.llmbuild_weights_bytes()
        if expected != weights_bytes:
            raise EngineError(
                f"{rank.weights} holds {weights_bytes} bytes of weights and the executable "
                f"reads {expected}; compile the model again"
            )
        try:
            self._kv_memory = mmap.mmap(-1, max(self.kv_bytes, 1))
        except (OSError, OverflowError) as error:
            raise EngineError(
                f"can't have {self.kv_bytes} bytes for the KV cache: {error}; give less kv_memory"
            ) from error
        self._handle = self._library.llmbuild_create(
            self._weights.address + header_bytes,
            ctypes.addressof(ctypes.c_char.from_buffer(self._kv_memory)),
            num_blocks,
            num_threads,
            pin_threads,
        )
        if self._handle is None:
            raise EngineError(
                f"can't start {num_threads} threads with {rank.arena_bytes} bytes of activations; "
                "give fewer threads, or compile with a smaller limits.max_step_tokens"
            )

    def step(self, batch: StepBatch) -> "NDArray[np.float32]":
        """Logits [R, vocab] of one step; the KV pools move forward. The GIL is free meanwhile."""
        import numpy as np

        logits = np.empty((batch.num_logit_rows, self.vocab_size), np.float32)
        status = self._library.llmbuild_step(*self._arguments(batch), logits.ctypes.data)
        assert status == 0, "the step is larger than the engine's limits"
        return logits

    def step_greedy(self, batch: StepBatch, num_steps: int = 1) -> list[list[int]]:
        """The likeliest tokens of each row, of `num_steps` steps; as Executor says."""
        assert num_steps == 1 or batch.is_decode
        tokens = array("i", bytes(4 * batch.num_logit_rows * num_steps))
        address = tokens.buffer_info()[0]
        status = self._library.llmbuild_step_greedy(*self._arguments(batch), num_steps, address)
        assert status == 0, "the step is larger than the engine's limits"
        return [tokens[i : i + num_steps].tolist() for i in range(0, len(tokens), num_steps)]

    def close(self) -> None:
        """Stop the threads and free the activations. Closing twice is allowed."""
        if self._handle is not None:
            if self._process == os.getpid():  # a fork would wait for threads that it hasn't
                self._library.llmbuild_destroy(self._handle)
            self._handle = None
            self._weights.close()

    def __del__(self) -> None:
        self.close()

    @cached_property
    def _kv(self) -> "NDArray[np.uint8]":
        """The bytes of all pools."""
        import numpy as np

        return np.frombuffer(self._kv_memory, np.uint8)

    def _arguments(self, batch: StepBatch) -> tuple[int, int, int, int, int, int]:
        """The engine and the step, as native code takes them."""
        assert self._handle is not None, "the executor is closed"
        if self._process != os.getpid():  # a fork has none of the team's threads
            raise UserError("the engine was opened before this process was forked; open it here")
        return (
            self._handle,
            batch.data.buffer_info()[0],
            batch.num_tokens,
            batch.num_sequences,
            batch.num_logit_rows,
            batch.blocks_per_sequence,
        )


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
    pointer, integer = ctypes.c_void_p, ctypes.c_int
    library.llmbuild_step_shape.restype = ctypes.c_char_p
    library.llmbuild_weights_bytes.restype = ctypes.c_int64
    library.llmbuild_create.restype = pointer
    library.llmbuild_create.argtypes = (pointer, pointer, ctypes.c_int64, integer, integer)
    library.llmbuild_destroy.argtypes = (pointer,)
    step = (pointer, pointer, integer, integer, integer, integer)
    library.llmbuild_step.argtypes = (*step, pointer)
    library.llmbuild_step_greedy.argtypes = (*step, integer, pointer)
    return library


def _map(path: Path) -> MappedFile:
    """A safetensors file."""
    try:
        return MappedFile(path)
    except OSError as error:
        raise EngineError(f"{path} can't be mapped: {error}; compile the model again") from error
