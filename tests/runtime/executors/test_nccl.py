"""Calls of NCCL, against a library that stands for it: it keeps what it was called with."""

import ctypes
import subprocess
from pathlib import Path

import pytest

from llmbuild.errors import EngineError
from llmbuild.runtime.executors import nccl

SOURCE = r"""
#include <string.h>
typedef struct { char internal[128]; } ncclUniqueId;
static char communicator, of[128];
static int ranks, rank, aborted, destroyed, failure;
int ncclGetUniqueId(ncclUniqueId* id) {
  for (int i = 0; i < 128; ++i) id->internal[i] = (char)(i * 7);
  return failure;
}
int ncclCommInitRank(void** to, int n, ncclUniqueId id, int r) {
  memcpy(of, id.internal, 128);
  ranks = n; rank = r; *to = &communicator;
  return failure;
}
int ncclCommAbort(void* of) { aborted += of == &communicator; return 0; }
int ncclCommDestroy(void* of) { destroyed += of == &communicator; return 0; }
const char* ncclGetErrorString(int status) { return status == 5 ? "invalid usage" : "?"; }
char* kept(void) { return of; }
int number(int which) {
  int numbers[] = {ranks, rank, aborted, destroyed};
  return numbers[which];
}
void fail(int status) { failure = status; }
void* handle(void) { return &communicator; }
"""


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ctypes.CDLL:
    source, path = tmp_path / "nccl.c", tmp_path / "libnccl.so.2"
    source.write_text(SOURCE)
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", path, source], check=True)
    made = ctypes.CDLL(str(path))
    monkeypatch.setattr(nccl, "load_nccl", lambda: made)
    return made


def test_ranks_join_by_the_id_of_one(library: ctypes.CDLL) -> None:
    of = nccl.unique_id()
    assert of == bytes(i * 7 % 256 for i in range(128))
    joined = nccl.Communicator(of, 3, 2)
    library.kept.restype = ctypes.POINTER(ctypes.c_char * 128)
    assert library.kept().contents.raw == of
    assert (library.number(0), library.number(1)) == (3, 2)
    library.handle.restype = ctypes.c_void_p
    pointer = ctypes.pythonapi.PyCapsule_GetPointer
    pointer.restype, pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    assert pointer(joined.capsule, None) == library.handle()


@pytest.mark.parametrize("first", ["abort", "close"])
def test_it_is_given_back_once(library: ctypes.CDLL, first: str) -> None:
    joined = nccl.Communicator(nccl.unique_id(), 1, 0)
    getattr(joined, first)()
    joined.close()
    joined.abort()
    assert (library.number(2), library.number(3)) == ((1, 0) if first == "abort" else (0, 1))


def test_what_fails_is_told(library: ctypes.CDLL) -> None:
    library.fail(5)
    with pytest.raises(EngineError, match="ncclGetUniqueId failed: invalid usage"):
        nccl.unique_id()


def test_a_machine_without_nccl_is_told_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nccl, "_NAME", "libnccl.so.of-nobody")
    with pytest.raises(EngineError, match=r"meet in NCCL, .*'\.\[nccl\]'"):
        nccl.load_nccl()
