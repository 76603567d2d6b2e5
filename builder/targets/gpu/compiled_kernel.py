"""A kernel as compiled for one SM, the form in which the cache keeps it, and what it uses."""

import hashlib
import re

import msgspec

from llmbuild.errors import InternalError

_DIGEST_BYTES = 32

# Of `ptxas -v`, which prints them once for the one entry point.
_SPILLS = re.compile(
    r"(?P<stack>\d+) bytes stack frame, (?P<stores>\d+) bytes spill stores, "
    r"(?P<loads>\d+) bytes spill loads"
)
_REGISTERS = re.compile(r"Used (\d+) registers")


class Resources(msgspec.Struct, frozen=True):
    """What a kernel takes: registers and spills by ptxas' count, the rest by Triton's."""

    registers: int  # of a thread
    stack_bytes: int  # of a thread, spills among them
    spilled_bytes: int  # stored and loaded by a thread
    shared_bytes: int  # of a block
    tensor_memory_columns: int
    global_scratch_bytes: int
    profile_scratch_bytes: int
    num_warps: int  # of a block


class CompiledKernel(msgspec.Struct, frozen=True):
    entry: str  # the entry point's name
    ptx: str
    cubin: bytes
    resources: Resources


def ptxas_figures(log: str) -> tuple[int, int, int]:
    """Registers, bytes of stack and bytes spilled, of what `ptxas -v` printed."""
    spills, registers = _SPILLS.search(log), _REGISTERS.search(log)
    if spills is None or registers is None:
        raise InternalError(f"ptxas didn't tell what a kernel uses; it printed:\n{log}")
    spilled = int(spills["stores"]) + int(spills["loads"])
    return int(registers[1]), int(spills["stack"]), spilled


def encode(kernel: CompiledKernel) -> bytes:
    """One file's bytes, the sha256 of the rest first."""
    data = msgspec.msgpack.encode(kernel)
    return hashlib.sha256(data).digest() + data


def decode(stored: bytes) -> CompiledKernel | None:
    """None when these aren't bytes as `encode` made them."""
    digest, data = stored[:_DIGEST_BYTES], stored[_DIGEST_BYTES:]
    if hashlib.sha256(data).digest() != digest:
        return None
    return msgspec.msgpack.decode(data, type=CompiledKernel)
