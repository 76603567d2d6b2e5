"""A plan is refused by its header alone: cut short, no plan, another version, another GPU."""

import struct
from pathlib import Path

import pytest

from llmbuild.errors import EngineError
from llmbuild.runtime.plan_header import check_plan, read_plan_header


def write_plan(path: Path, *, magic: bytes = b"vtrt", size: int = 100, mask: int = 8 | 16) -> Path:
    """A header as TensorRT for RTX 1.7.1.116 writes it, and 36 bytes after it."""
    header = struct.pack("<4sIQQ4s4sI", magic, 2, 0, size, bytes([1, 7, 1, 116]), b"vtrt", mask)
    path.write_bytes(header.ljust(100, b"\0"))
    return path


def test_header_is_read(tmp_path: Path) -> None:
    header = read_plan_header(write_plan(tmp_path / "engine.plan"))
    assert (header.size_bytes, header.version) == (100, "1.7.1.116")
    assert header.capabilities == ("8.9", "12.0")
    check_plan(tmp_path / "engine.plan", "1.7.1.116", ["8.9"])


def test_each_bit_is_a_capability(tmp_path: Path) -> None:
    header = read_plan_header(write_plan(tmp_path / "engine.plan", mask=63))
    assert header.capabilities == ("7.5", "8.0", "8.6", "8.9", "12.0", "12.1")


@pytest.mark.parametrize("size", [0, 63, 64, 99])
def test_truncated_plan_is_refused(tmp_path: Path, size: int) -> None:
    path = write_plan(tmp_path / "engine.plan")
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(EngineError, match="damaged" if size >= 64 else "no TensorRT plan"):
        read_plan_header(path)


def test_longer_plan_is_refused(tmp_path: Path) -> None:
    path = write_plan(tmp_path / "engine.plan", size=99)
    with pytest.raises(EngineError, match="says 99 bytes, and it has 100"):
        read_plan_header(path)


def test_another_file_is_refused(tmp_path: Path) -> None:
    path = write_plan(tmp_path / "engine.plan", magic=b"\x7fELF")
    with pytest.raises(EngineError, match=r"no TensorRT plan: it begins with b'\\x7fELF'"):
        read_plan_header(path)


def test_another_version_is_refused_with_both(tmp_path: Path) -> None:
    path = write_plan(tmp_path / "engine.plan")
    with pytest.raises(EngineError, match=r"RTX 1\.7\.1\.116, and 1\.8\.0\.9 is wanted"):
        check_plan(path, "1.8.0.9", ["8.9"])


def test_a_gpu_that_it_was_not_built_for_is_refused(tmp_path: Path) -> None:
    path = write_plan(tmp_path / "engine.plan")
    with pytest.raises(EngineError, match=r"capabilities 8\.9, 12\.0, and 8\.6 is wanted"):
        check_plan(path, "1.7.1.116", ["8.9", "8.6"])
