"""The header of a TensorRT plan, which says whether the file is whole and what it runs on, so that
an engine is refused before any GPU library is loaded.

A plan begins with 64 bytes, of which these were found by comparing plans: `vtrt`; from byte 16 the
file's size, u64; from byte 24 the version of TensorRT for RTX, four bytes; from byte 32 a bit for
each compute capability, u32. Numbers are little-endian.
"""

import struct
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from llmbuild.errors import EngineError

HEADER_BYTES = 64
CAPABILITY_BITS = {"7.5": 1, "8.0": 2, "8.6": 4, "8.9": 8, "12.0": 16, "12.1": 32}
_MAGIC = b"vtrt"


@dataclass(frozen=True)
class PlanHeader:
    """What a plan says of itself. version: such as 1.7.1.116. capabilities: ascending."""

    size_bytes: int
    version: str
    capabilities: tuple[str, ...]


def read_plan_header(path: Path) -> PlanHeader:
    """The header of a whole plan. Raises EngineError for a file that is no plan, or cut short."""
    with path.open("rb") as file:
        header = file.read(HEADER_BYTES)
    if len(header) < HEADER_BYTES or not header.startswith(_MAGIC):
        raise EngineError(f"{path} is no TensorRT plan: it begins with {header[:4]!r}")
    (size_bytes,) = struct.unpack_from("<Q", header, 16)
    (mask,) = struct.unpack_from("<I", header, 32)
    actual = path.stat().st_size
    if size_bytes != actual:
        raise EngineError(
            f"{path} is damaged: its header says {size_bytes} bytes, and it has {actual}"
        )
    capabilities = tuple(each for each, bit in CAPABILITY_BITS.items() if mask & bit)
    return PlanHeader(size_bytes, ".".join(map(str, header[24:28])), capabilities)


def check_plan(path: Path, version: str, capabilities: Iterable[str]) -> None:
    """Raises EngineError where read_plan_header does, and for a plan of another version of
    TensorRT for RTX than this, or that lacks one of these compute capabilities."""
    header = read_plan_header(path)
    if header.version != version:
        raise EngineError(
            f"{path} was built by TensorRT for RTX {header.version}, and {version} is wanted; "
            "install the first, or compile the engine again"
        )
    missing = [each for each in capabilities if each not in header.capabilities]
    if missing:
        raise EngineError(
            f"{path} was built for compute capabilities {', '.join(header.capabilities)}, and "
            f"{', '.join(missing)} is wanted; compile the engine again for it"
        )
