"""Runs one rank of an engine of the cpu target: native code and mapped weights, through ctypes."""

import ctypes
import mmap
import os
from array import array
from functools import cached_property
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING

from llmbuild.errors import EngineError, RankError, UserError
from llmbuild.runtime.batch import StepBatch
from llmbuild.runtime.engine import Engine
from llmbuild.runtime.executors.mapped import MappedFile

if TYPE_CHECKING:  # greedy serving does without numpy, whose import takes longer than a load
    import numpy as np
    from numpy.typing import NDArray

ABI = "llmbuild-cpu-4"
_TOO_LARGE, _RANK_FAILED = 1, 2  # what a step can end with, beside 0
_MOST_SLASHES = 2000  # of a path's 4,096 bytes
_openings = count()


class RanksConfig(ctypes.Structure):
    """How one rank finds the others: RanksConfig of plugins/common/ranks.h, field for field."""

    _fields_ = (
        ("rank", ctypes.c_int32),
        ("tp", ctypes.c_int32),
        ("pp", ctypes.c_int32),
        ("timeout_ms", ctypes.c_int32),
        ("memory", ctypes.c_void_p),
        ("memory_bytes", ctypes.c_int64),
        ("sockets", ctypes.POINTER(ctypes.c_int32)),
        ("token_firsts", ctypes.POINTER(ctypes.c_int32)),
    )


class CpuExecutor:
    """One rank of a loaded engine with its KV pools and its thread team; one step at a time.

    num_blocks: of every layer's pools, the scratch block included. num_threads: size of the
    team, of which the calling thread is one. pin_threads: during a step thread i stays on the
    i-th processor that this process may use, the calling one included. ranks: the way to the
    others, None for an engine of one rank. Raises EngineError when the executable isn't what the
    manifest describes, or memory can't be had.
    """

    def __init__(
        self,
        engine: Engine,
        num_blocks: int,
        num_threads: int,
        pin_threads: bool = False,
        *,
        rank: int = 0,
        ranks: RanksConfig | None = None,
    ) -> None:
        manifest, record = engine.manifest, engine.manifest.ranks[rank]
        assert (ranks is None) == (len(manifest.ranks) == 1)
        self.vocab_size = manifest.vocab_size
        self.num_blocks = num_blocks
        self.kv_bytes = num_blocks * manifest.kv_of(record).block_bytes
        self._rank = rank
        self._timeout_ms = 0 if ranks is None else ranks.timeout_ms
        self._handle: int | None = None
        self._process = os.getpid()
        self._library = _load(executable_path(engine, rank))
        shape = manifest.step_shape_of(record)
        compiled = self._library.llmbuild_step_shape().decode()
        if compiled != shape:
            raise EngineError(
                f"{record.executables[engine.variant]} was compiled for {compiled}, and the "
                f"manifest says {shape}; compile the model again"
            )
        expected = self._library.llmbuild_weights_bytes()
        self._weights, weights = _map_weights(engine, record.weights, expected)
        self._shared_weights, shared = None, None
        if record.shared_weights is not None:
            expected = self._library.llmbuild_shared_weights_bytes()
            self._shared_weights, shared = _map_weights(engine, record.shared_weights, expected)
        try:
            self._kv_memory = mmap.mmap(-1, max(self.kv_bytes, 1))
        except (OSError, OverflowError) as error:
            raise EngineError(
                f"can't have {self.kv_bytes} bytes for the KV cache: {error}; give less kv_memory"
            ) from error
        self._handle = self._library.llmbuild_create(
            weights,
            shared,
            ctypes.addressof(ctypes.c_char.from_buffer(self._kv_memory)),
            num_blocks,
            num_threads,
            pin_threads,
            None if ranks is None else ctypes.byref(ranks),
        )
        if self._handle is None:
            raise EngineError(
                f"can't start {num_threads} threads with {record.arena_bytes} bytes of "
                "activations; give fewer threads, or compile with a smaller limits.max_step_tokens"
            )

    def step(self, batch: StepBatch) -> "NDArray[np.float32]":
        """Logits [R, vocab] of one step; the KV pools move forward. The GIL is free meanwhile."""
        logits = self.step_parts(batch.data, _sizes(batch), wants_logits=True)
        assert logits is not None
        return logits

    def step_greedy(self, batch: StepBatch, num_steps: int = 1) -> list[list[int]]:
        """The likeliest tokens of each row, of `num_steps` steps; as Executor says."""
        assert num_steps == 1 or batch.is_decode
        return self.step_parts_greedy(batch.data, _sizes(batch), num_steps)

    def step_parts(
        self, arrays: "array[int]", sizes: "array[int]", wants_logits: bool
    ) -> "NDArray[np.float32] | None":
        """One step in parts, which all ranks have to run: the rank's share of it.

        arrays: StepBatch.data of the parts, one after the other. sizes: tokens, sequences, logit
        rows and blocks per sequence of each. wants_logits: true on rank 0, which gets them, [rows
        of all parts, vocab], and nowhere else. Raises RankError when a rank fails.
        """
        assert wants_logits == (self._rank == 0), "logits come together on rank 0"
        logits = None
        if wants_logits:
            import numpy as np

            logits = np.empty((sum(sizes[2::4]), self.vocab_size), np.float32)
        address = None if logits is None else logits.ctypes.data
        self._check(self._library.llmbuild_step(*self._arguments(arrays, sizes), address))
        return logits

    def step_parts_greedy(
        self, arrays: "array[int]", sizes: "array[int]", num_steps: int
    ) -> list[list[int]]:
        """The same for `num_steps` greedy steps; on rank 0 the likeliest tokens of each row of all
        parts, elsewhere nothing."""
        rows = sum(sizes[2::4]) if self._rank == 0 else 0
        tokens = array("i", bytes(4 * rows * num_steps))
        address = tokens.buffer_info()[0] if self._rank == 0 else None
        step = self._library.llmbuild_step_greedy
        self._check(step(*self._arguments(arrays, sizes), num_steps, address))
        return [tokens[i : i + num_steps].tolist() for i in range(0, len(tokens), num_steps)]

    def close(self) -> None:
        """Stop the threads and free the activations. Closing twice is allowed."""
        if self._handle is not None:
            if self._process == os.getpid():  # a fork would wait for threads that it hasn't
                self._library.llmbuild_destroy(self._handle)
            self._handle = None
            self._weights.close()
            if self._shared_weights is not None:
                self._shared_weights.close()

    def __del__(self) -> None:
        self.close()

    @cached_property
    def _kv(self) -> "NDArray[np.uint8]":
        """The bytes of all pools."""
        import numpy as np

        return np.frombuffer(self._kv_memory, np.uint8)

    def _check(self, status: int) -> None:
        """How a step ended."""
        assert status != _TOO_LARGE, "the step is larger than the engine's limits"
        if status == _RANK_FAILED:
            rank = self._library.llmbuild_failed_rank(self._handle)
            raise RankError(
                rank,
                f"rank {rank} of the engine is gone, or kept rank {self._rank} waiting for more "
                f"than {self._timeout_ms} ms; open the engine again",
            )

    def _arguments(self, arrays: "array[int]", sizes: "array[int]") -> tuple[int, int, int, int]:
        """The engine and the step's parts, as native code takes them."""
        assert self._handle is not None, "the executor is closed"
        if self._process != os.getpid():  # a fork has none of the team's threads
            raise UserError("the engine was opened before this process was forked; open it here")
        return (
            self._handle,
            arrays.buffer_info()[0],
            sizes.buffer_info()[0],
            len(sizes) // 4,
        )


def executable_path(engine: Engine, rank: int) -> Path:
    """Of the ISA level that the engine runs at."""
    return engine.root / engine.manifest.ranks[rank].executables[engine.variant]


def ranks_bytes(engine: Engine, rank: int = 0) -> int:
    """Bytes of memory that an engine's ranks have to share, 0 for an engine of one; any rank's
    executable knows. Raises EngineError when it can't be loaded."""
    return int(_load(executable_path(engine, rank)).llmbuild_ranks_bytes())


def _sizes(batch: StepBatch) -> "array[int]":
    """Of a step that is one part."""
    counts = (batch.num_tokens, batch.num_sequences, batch.num_logit_rows)
    return array("i", (*counts, batch.blocks_per_sequence))


def open_library(path: Path) -> ctypes.CDLL:
    """The library that the file holds now. The dynamic loader takes a name that it knows for the
    file that it was then, and libraries of C++ stay; so each time the name has other slashes."""
    slashes = "/" * (1 + next(_openings) % _MOST_SLASHES)
    return ctypes.CDLL(f"{path.parent}{slashes}{path.name}")


def _load(path: Path) -> ctypes.CDLL:
    try:
        library = open_library(path)
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
    for name in ("weights", "shared_weights", "ranks"):
        getattr(library, f"llmbuild_{name}_bytes").restype = ctypes.c_int64
    library.llmbuild_create.restype = pointer
    create = (pointer, pointer, pointer, ctypes.c_int64, integer, integer, pointer)
    library.llmbuild_create.argtypes = create
    library.llmbuild_destroy.argtypes = (pointer,)
    library.llmbuild_failed_rank.argtypes = (pointer,)
    step = (pointer, pointer, pointer, integer)
    library.llmbuild_step.argtypes = (*step, pointer)
    library.llmbuild_step_greedy.argtypes = (*step, integer, pointer)
    return library


def _map_weights(engine: Engine, name: str, expected_bytes: int) -> tuple[MappedFile, int]:
    """A safetensors file of the engine, and the address of its data."""
    path = engine.root / name
    try:
        file = MappedFile(path)
    except OSError as error:
        raise EngineError(f"{path} can't be mapped: {error}; compile the model again") from error
    header_bytes = 8 + int.from_bytes(file.first_bytes(8), "little")
    weights_bytes = file.size_bytes - header_bytes
    if expected_bytes != weights_bytes:
        raise EngineError(
            f"{name} holds {weights_bytes} bytes of weights and the executable reads "
            f"{expected_bytes}; compile the model again"
        )
    return file, file.address + header_bytes
