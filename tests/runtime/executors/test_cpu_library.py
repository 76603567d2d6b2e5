"""Libraries that replace others: what is loaded is what the file holds now."""

import ctypes
import subprocess
from pathlib import Path

from llmbuild.runtime.executors.cpu import open_library


def write_library(path: Path, answer: int) -> None:
    """A C++ library that stays loaded, as an engine's does: it has a unique symbol."""
    source = path.with_suffix(".cpp")
    source.write_text(
        "template <class T> int counted() { static int calls = 0; return ++calls; }\n"
        f'extern "C" int answer() {{ return counted<int>() ? {answer} : 0; }}\n'
    )
    path.unlink(missing_ok=True)
    subprocess.run(["g++", "-shared", "-fPIC", "-o", path, source], check=True)


def test_a_library_in_the_place_of_another_is_loaded(tmp_path: Path) -> None:
    path = tmp_path / "engine.so"
    write_library(path, 1)
    assert ctypes.CDLL(str(path)).answer() == 1
    assert open_library(path).answer() == 1
    write_library(path, 2)
    assert ctypes.CDLL(str(path)).answer() == 1  # what the loader does by itself
    assert [open_library(path).answer() for _ in range(3)] == [2, 2, 2]
    write_library(path, 3)
    assert open_library(path).answer() == 3
