"""Instruction-set levels: what an executable was compiled for, and what this processor has."""

import platform
from dataclasses import dataclass
from pathlib import Path

from llmbuild.errors import EngineError

CPUINFO = Path("/proc/cpuinfo")

_X86_64 = frozenset({"cmov", "cx8", "fpu", "fxsr", "mmx", "sse", "sse2"})
_X86_64_V2 = _X86_64 | {"cx16", "lahf_lm", "pni", "popcnt", "sse4_1", "sse4_2", "ssse3"}
_X86_64_V3 = _X86_64_V2 | {
    "abm",  # lzcnt
    "avx",
    "avx2",
    "bmi1",
    "bmi2",
    "f16c",
    "fma",
    "movbe",
    "xsave",
}
_X86_64_V4 = _X86_64_V3 | {"avx512bw", "avx512cd", "avx512dq", "avx512f", "avx512vl"}


@dataclass(frozen=True)
class IsaLevel:
    """One level. `flags` are the processor features it needs, in the kernel's spelling."""

    name: str
    machine: str  # platform.machine()
    flags: frozenset[str]


# Best first within a machine. The x86-64 levels are those of the x86-64 psABI, and with -vnni the
# same and a dot product of bytes.
LEVELS = {
    level.name: level
    for level in (
        IsaLevel("x86-64-v4-vnni", "x86_64", _X86_64_V4 | {"avx512_vnni"}),
        IsaLevel("x86-64-v4", "x86_64", _X86_64_V4),
        IsaLevel("x86-64-v3-vnni", "x86_64", _X86_64_V3 | {"avx_vnni"}),
        IsaLevel("x86-64-v3", "x86_64", _X86_64_V3),
        IsaLevel("x86-64", "x86_64", _X86_64),
        IsaLevel("aarch64", "aarch64", frozenset({"asimd", "fp"})),
    )
}


def processor_flags(cpuinfo: Path = CPUINFO) -> frozenset[str]:
    """The features that every processor of this machine has.

    Raises EngineError when the kernel doesn't tell.
    """
    try:
        lines = cpuinfo.read_text().splitlines()
    except OSError as error:
        raise EngineError(
            f"can't tell which instructions this processor has: {cpuinfo}: {error.strerror}; "
            "engines for the cpu target need Linux with /proc mounted"
        ) from error
    fields = (line.partition(":") for line in lines)
    per_processor = [
        frozenset(value.split()) for key, _, value in fields if key.strip() in ("flags", "Features")
    ]
    return frozenset.intersection(*per_processor) if per_processor else frozenset()


def missing_flags(level: str, cpuinfo: Path = CPUINFO) -> list[str]:
    """What this processor lacks for the level named, sorted; empty when it has everything.

    Only a level of this machine can be asked about: the kernel spells another's differently.
    """
    return sorted(LEVELS[level].flags - processor_flags(cpuinfo))


def supported_levels(cpuinfo: Path = CPUINFO) -> list[str]:
    """The levels that this machine's processors can run, best first."""
    machine = platform.machine()
    return [
        level.name
        for level in LEVELS.values()
        if level.machine == machine and not missing_flags(level.name, cpuinfo)
    ]
