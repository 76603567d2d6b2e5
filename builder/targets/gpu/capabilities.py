"""The compute capabilities that kernels are built for: what an SM of each holds, and its PTX.

Limits are those of the CUDA C++ Programming Guide, table "Technical Specifications per Compute
Capability"; PTX versions and drivers those of the PTX ISA's release history.
"""

from dataclasses import dataclass

from llmbuild.errors import BuildError

WARP_THREADS = 32

_REGISTERS = 64 * 1024  # of an SM, the same for all of them
_PARTITIONS = 4  # of an SM, each with its share of the registers
_REGISTER_UNIT = 256  # a warp is given a multiple of so many
_SHARED_UNIT = 128
_RESERVED_SHARED = 1024  # that CUDA takes of each block


@dataclass(frozen=True)
class Capability:
    """What one SM holds at a time, and the oldest PTX that can say what its kernels need."""

    warps: int
    blocks: int
    shared_bytes: int
    ptx_version: int  # 84 is PTX ISA 8.4
    driver: str  # the oldest branch that accepts it


# sm_89's FP8 tensor core instructions came with PTX ISA 8.4; sm_100 and sm_120 themselves with
# 8.6 and 8.7.
CAPABILITIES = {
    80: Capability(64, 32, 164 * 1024, 80, "R525"),
    86: Capability(48, 16, 100 * 1024, 80, "R525"),
    89: Capability(48, 24, 100 * 1024, 84, "R550"),
    90: Capability(64, 32, 228 * 1024, 80, "R525"),
    100: Capability(64, 32, 228 * 1024, 86, "R565"),
    120: Capability(48, 24, 100 * 1024, 87, "R570"),
}


def capability(sm: int) -> Capability:
    if sm not in CAPABILITIES:
        known = ", ".join(map(str, CAPABILITIES))
        raise BuildError(f"GPU kernels aren't built for SM {sm}; known: {known}")
    return CAPABILITIES[sm]


def ptx_target(sm: int) -> str:
    """What PTX names as its target. From 90 on Triton writes for that architecture alone."""
    return f"sm_{sm}a" if sm >= 90 else f"sm_{sm}"


def occupancy(sm: int, registers: int, shared_bytes: int, num_warps: int) -> float:
    """The share of an SM's warps that blocks of a kernel can fill at most, as the CUDA occupancy
    calculator counts: registers a thread, shared memory and warps a block, with the largest
    carve-out for shared memory."""
    limits = capability(sm)
    warp_registers = _round_up(registers * WARP_THREADS, _REGISTER_UNIT)
    partition_warps = _REGISTERS // _PARTITIONS // warp_registers
    block_shared = _round_up(shared_bytes + _RESERVED_SHARED, _SHARED_UNIT)
    blocks = min(
        limits.blocks,
        limits.warps // num_warps,
        _PARTITIONS * partition_warps // num_warps,
        limits.shared_bytes // block_shared,
    )
    return blocks * num_warps / limits.warps


def _round_up(value: int, unit: int) -> int:
    return -(-value // unit) * unit
