"""Compiles instantiations of the CPU kernels and calls them on numpy arrays."""

import ctypes
import hashlib
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray

from llmbuild.builder.targets.cpu.toolchain import level_flags
from llmbuild.runtime.isa import supported_levels

PLUGINS = Path(__file__).parents[2] / "plugins"

DTYPES = {"float": np.dtype(np.float32), "bf16": np.dtype(ml_dtypes.bfloat16)}

# with_team(threads, f) calls f(worker) on every worker of a fresh team.
PROLOGUE = """
#include "common/step.h"
#include "common/team.h"
using namespace llmbuild;
template <class F>
void with_team(int threads, F f) {
  Team team(threads);
  team.run([](const Worker& worker, void* call) { (*static_cast<F*>(call))(worker); }, &f);
}
"""


LEVELS = supported_levels()


def _with_quick(levels: set[str]) -> list[Any]:
    return [
        level if level in levels else pytest.param(level, marks=pytest.mark.slow)
        for level in LEVELS
    ]


# For fixtures. The quick tests take the best level, and of what has code of its own for AVX2 that
# as well; the rest compiles the same for others.
EACH_LEVEL = _with_quick({LEVELS[0]})
EACH_VECTOR_LEVEL = _with_quick({LEVELS[0], "x86-64-v3"})


class Library:
    """A compiled translation unit; call("name", ...) runs one of its extern "C" functions."""

    def __init__(self, path: Path) -> None:
        self._library = ctypes.CDLL(str(path))

    def call(self, name: str, *arguments: Any) -> int:
        return int(getattr(self._library, name)(*(_as_ctype(value) for value in arguments)))


class KernelCompiler:
    """Compiles a source for every ISA level at once, each source once a session."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._libraries: dict[tuple[str, str], Library] = {}

    def library(self, source: str, level: str) -> Library:
        if (source, level) not in self._libraries:
            self._libraries[source, level] = Library(self._compile(source, level))
        return self._libraries[source, level]

    def _compile(self, source: str, level: str) -> Path:
        stem = f"{hashlib.sha256(source.encode()).hexdigest()[:16]}-{level}"
        unit = self._directory / f"{stem}.cpp"
        unit.write_text(PROLOGUE + source)
        output = unit.with_suffix(".so")
        warnings = ["-Wall", "-Wextra", "-Werror"]
        flags = ["-std=c++17", "-O2", *level_flags(level), "-ffp-contract=fast", *warnings]
        command = ["g++", *flags, "-fPIC", "-shared", "-pthread", f"-I{PLUGINS}"]
        result = subprocess.run(
            [*command, str(unit), "-o", str(output)], capture_output=True, text=True, check=False
        )
        assert result.returncode == 0, result.stderr
        return output


class _StepStruct(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_int) for name in ("tokens", "sequences", "logit_rows", "blocks")),
        *((f"array{i}", ctypes.c_void_p) for i in range(6)),
    )


@dataclass(frozen=True)
class Step:
    """A ragged batch for kernels that take a Step; arrays as in runtime.batch.StepBatch."""

    positions: NDArray[np.int32]
    query_start: NDArray[np.int32]
    kv_lengths: NDArray[np.int32]
    block_tables: NDArray[np.int32]

    def as_struct(self) -> _StepStruct:
        zeros = np.zeros_like(self.positions)
        arrays = (zeros, self.positions, self.query_start, self.kv_lengths, self.block_tables)
        shape = (len(self.positions), len(self.kv_lengths), 0, self.block_tables.shape[1])
        struct = _StepStruct(*shape, *(array.ctypes.data for array in arrays), None)
        struct.keep_alive = arrays
        return struct

    def slots(self, block_size: int) -> list[tuple[int, int]]:
        """(physical block, offset) of every token of the step."""
        slots = []
        for s in range(len(self.kv_lengths)):
            for position in self.positions[self.query_start[s] : self.query_start[s + 1]]:
                block = int(self.block_tables[s, position // block_size])
                slots.append((block, int(position) % block_size))
        return slots


def make_step(
    sequences: Sequence[tuple[int, int]], block_size: int, rng: np.random.Generator
) -> tuple[Step, int]:
    """A step of sequences given as (computed tokens, new tokens), blocks shuffled over a pool.

    Returns the step and the number of blocks of the pool; block 0 belongs to no sequence.
    """
    lengths = [computed + new for computed, new in sequences]
    counts = [-(-length // block_size) for length in lengths]
    num_blocks = sum(counts) + 3
    free = list(rng.permutation(np.arange(1, num_blocks)))
    tables = np.zeros((len(sequences), max(counts, default=1) + 1), np.int32)
    for s, count in enumerate(counts):
        tables[s, :count] = [free.pop() for _ in range(count)]
    positions = [np.arange(computed, computed + new) for computed, new in sequences]
    step = Step(
        positions=np.concatenate([*positions, []]).astype(np.int32),
        query_start=np.cumsum([0, *(new for _, new in sequences)]).astype(np.int32),
        kv_lengths=np.array(lengths, np.int32),
        block_tables=tables,
    )
    return step, num_blocks


def _as_ctype(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        assert value.flags.c_contiguous
        return ctypes.c_void_p(value.ctypes.data)
    if isinstance(value, Step):
        return ctypes.byref(value.as_struct())
    if isinstance(value, float):
        return ctypes.c_float(value)
    if value is None:
        return ctypes.c_void_p(None)
    return ctypes.c_int(value)


def bits(array: NDArray[Any]) -> NDArray[Any]:
    """The array's bit patterns, for comparisons that tell -0 from 0 and one NaN from another."""
    return np.ascontiguousarray(array).view(f"u{array.dtype.itemsize}")
