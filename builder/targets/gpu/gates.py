"""What a compiled kernel must keep to, so that TensorRT can launch it as a plugin's and nothing
slows it down unseen."""

import re

from llmbuild.builder.targets.gpu.capabilities import capability, ptx_target
from llmbuild.builder.targets.gpu.compiled_kernel import CompiledKernel

SHARED_LIMIT_BYTES = 48 * 1024  # what a launch may ask for without opting in to more

_VERSION = re.compile(r"^\.version (\d+)\.(\d+)$", re.MULTILINE)
_TARGET = re.compile(r"^\.target (\w+)", re.MULTILINE)
_EXTERNAL = re.compile(r"^\s*\.extern\s+\.func\b[^;]*?(\w+)\s*(?:\(|;|$)", re.MULTILINE)


def broken_gates(sm: int, kernel: CompiledKernel) -> list[str]:
    """For each limit that is broken: the value and the limit."""
    uses = kernel.resources
    limits = [
        ("spills {} bytes a thread", uses.spilled_bytes, 0),
        ("takes {} bytes of shared memory", uses.shared_bytes, SHARED_LIMIT_BYTES),
        ("takes {} columns of tensor memory", uses.tensor_memory_columns, 0),
        ("takes {} bytes of global scratch", uses.global_scratch_bytes, 0),
        ("takes {} bytes of profile scratch", uses.profile_scratch_bytes, 0),
    ]
    problems = [
        f"{what.format(value)}, of {limit} at most"
        for what, value, limit in limits
        if value > limit
    ]
    return [*problems, *_broken_ptx_gates(sm, kernel.ptx)]


def ptx_version(ptx: str) -> int:
    """84 for PTX ISA 8.4."""
    found = _VERSION.search(ptx)
    return 10 * int(found[1]) + int(found[2]) if found else 0


def _broken_ptx_gates(sm: int, ptx: str) -> list[str]:
    expected, version = capability(sm), ptx_version(ptx)
    target = found[1] if (found := _TARGET.search(ptx)) else "none"
    problems = []
    if not 0 < version <= expected.ptx_version:
        problems.append(
            f"is PTX {_dotted(version)}, of {_dotted(expected.ptx_version)} at most "
            f"for driver {expected.driver}"
        )
    if target != ptx_target(sm):
        problems.append(f"is PTX for {target} instead of {ptx_target(sm)}")
    if external := _EXTERNAL.findall(ptx):
        problems.append(f"calls {', '.join(external)}, which nothing defines")
    return problems


def _dotted(version: int) -> str:
    return f"{version // 10}.{version % 10}"
