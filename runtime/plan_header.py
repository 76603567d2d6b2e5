"""The header of a TensorRT plan, which says whether the file is whole and what it runs on, so that
an engine is refused before any GPU library is loaded.

A plan begins with 64 bytes, of which these were found by comparing plans: `vtrt`; from byte 16 the
file's size, u64; from byte 24 the version of TensorRT for RTX, four bytes; from byte 32 a bit for
each compute capability, u32. Numbers are little-endian.
"""

import struct
from dataclasses import dataclass
from pathlib import Path

from llmbuild.errors import EngineError

HEADER_BYTES = 64
CAPABILITY_BITS = {75: 1, 80: 2, 86: 4, 89: 8, 120: 16, 121: 32}  # 89 is compute capability 8.9
_MAGIC = b"vtrt"


@dataclass(frozen=True)
class PlanHeader:
    """What a plan says of itself. version: such as 1.7.1.116."""

    size_bytes: int
    version: str
    capabilities: tuple[int, ...]


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


def check_plan(path: Path, version: str, capability: int) -> None:
    """Raises EngineError where read_plan_header does, and for a plan of another version of
    TensorRT for RTX than the one that is here, or not for this compute capability."""
    header = read_plan_header(path)
    if header.version != version:
        raise EngineError(
            f"{path} was built by TensorRT for RTX {header.version}, and {version} is installed; "
            "install the first, or compile the engine again"
        )
    if capability not in header.capabilities:
        built = ", ".join(map(_spelt, header.capabilities))
        raise EngineError(
            f"{path} was built for compute capabilities {built}, and this GPU has "
            f"{_spelt(capability)}; compile the engine again for it"
        )


def _spelt(capability: int) -> str:
    return f"{capability // 10}.{capability % 10}"
