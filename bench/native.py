"""C++ of the benchmarks: compiled by the project's toolchain, loaded through ctypes."""

import ctypes
import tempfile
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from llmbuild.builder.targets.cpu import toolchain

FOLDER = Path(__file__).parent


def load(source: str) -> ctypes.CDLL:
    """`source` with timed.h before it, compiled for this processor's best ISA level.

    Every exported function whose name doesn't end in `_operations` returns seconds.
    """
    (level,) = toolchain.resolve_levels([toolchain.NATIVE])
    timed = (FOLDER / "timed.h").read_text().replace("#pragma once", "")
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "bench.so"
        toolchain.compile(timed + source, level, out)
        return ctypes.CDLL(str(out))


def timed_function(library: ctypes.CDLL, name: str, *types: type) -> "ctypes._NamedFuncPointer":
    """A function of the library that returns seconds."""
    function = library[name]
    function.restype = ctypes.c_double
    function.argtypes = types
    return function


def filled(size_bytes: int) -> NDArray[np.uint8]:
    """Memory, touched, that holds numbers around 0.01 whether it is read as fp32 or as bf16."""
    pattern = np.random.default_rng(1).integers(0x3C00, 0x3C80, 1 << 18).astype(np.uint16)
    return np.resize(pattern, -(-size_bytes // 2)).view(np.uint8)
