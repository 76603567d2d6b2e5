"""Kernels that are small, and kernels made to break a gate or the compiler. Not to be imported
where other tests interpret kernels."""

import signal

import triton
import triton.language as tl

from llmbuild.plugins.common.kernel_variant import KernelVariant


@triton.jit
def doubled(x):
    return x + x


@triton.jit
def add(x, y, out, size, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    tl.store(out + at, tl.load(x + at, inside) + doubled(tl.load(y + at, inside)), inside)


@triton.jit
def matmul(a, b, out, depth, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr):
    row, column, at = tl.arange(0, ROWS), tl.arange(0, COLUMNS), tl.arange(0, DEPTH)
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for first in range(0, depth, DEPTH):
        left = tl.load(a + row[:, None] * depth + first + at[None, :])
        right = tl.load(b + column[None, :] * depth + first + at[:, None])
        total = tl.dot(left, right, total)
    tl.store(out + row[:, None] * COLUMNS + column[None, :], total)


@triton.jit
def described(x, out, size, BLOCK: tl.constexpr):
    """Makes its tensor descriptor itself, in global scratch."""
    description = tl.make_tensor_descriptor(x, [size], [1], [BLOCK])
    tl.store(out + tl.arange(0, BLOCK), description.load([0]))


@triton.jit
def printing(x):
    tl.device_print("x", tl.load(x))


@triton.jit
def malformed(x):
    tl.store(x, tl.load(x) + tl.no_such_function(x))


@triton.constexpr_function
def killed(signal_number):
    own = __import__("os")  # a name that Triton doesn't look up, as it allows no such calls
    own.kill(own.getpid(), signal_number)


@triton.jit
def deadly(x, SIGNAL: tl.constexpr):
    """Ends the process that compiles it."""
    killed(SIGNAL)
    tl.store(x, 0)


@triton.jit
def unsupported(x):
    """Calls what Triton refuses before it compiles anything."""
    tl.store(x, signal.getsignal(1))


_ADD = {"x": "*fp16", "y": "*fp16", "out": "*fp16", "size": "i32", "BLOCK": "constexpr"}
_DEADLY = {"x": "*fp32", "SIGNAL": "constexpr"}
_TILES = dict.fromkeys(("ROWS", "COLUMNS", "DEPTH"), "constexpr")


def _matmul(name: str, kind: str, tile: int, num_warps: int, num_stages: int) -> KernelVariant:
    signature = {"a": kind, "b": kind, "out": "*fp32", "depth": "i32", **_TILES}
    constants = {"ROWS": tile, "COLUMNS": tile, "DEPTH": 32}
    pointers = ("a", "b", "out", "depth")
    return KernelVariant(name, matmul, signature, constants, num_warps, num_stages, pointers)


TOYS = {
    variant.name: variant
    for variant in (
        KernelVariant("add", add, _ADD, {"BLOCK": 1024}, 4, 1, tuple(_ADD)[:4], 6),
        KernelVariant("add.unaligned", add, _ADD, {"BLOCK": 1024}, 4, 1),
        _matmul("matmul", "*fp16", 32, 4, 2),
        _matmul("matmul.fp8", "*fp8e4nv", 32, 4, 2),
        _matmul("tensor_memory", "*fp16", 64, 4, 2),
        _matmul("spilling", "*fp16", 128, 1, 1),
        _matmul("large", "*fp16", 128, 8, 5),
        KernelVariant(
            "described",
            described,
            {"x": "*fp16", "out": "*fp16", "size": "i32", "BLOCK": "constexpr"},
            {"BLOCK": 128},
            4,
            1,
            ("x",),
        ),
        KernelVariant("printing", printing, {"x": "*fp32"}, {}, 1, 1),
        KernelVariant("malformed", malformed, {"x": "*fp32"}, {}, 1, 1),
        KernelVariant("unsupported", unsupported, {"x": "*fp32"}, {}, 1, 1),
        KernelVariant("misnamed", malformed, {"y": "*fp32"}, {}, 1, 1),
        KernelVariant("deadly", deadly, _DEADLY, {"SIGNAL": int(signal.SIGKILL)}, 1, 1),
    )
}
