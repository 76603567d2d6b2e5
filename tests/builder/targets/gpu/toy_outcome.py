"""Which toys are compiled for which SMs, and what compile_toys.py prints of each."""

from collections.abc import Callable

import msgspec

from llmbuild.builder.targets.gpu.compiled_kernel import CompiledKernel

# In this order: nothing is hidden by those that fail.
FAILING = ("malformed:80", "deadly:80", "unsupported:80", "misnamed:80", "matmul.fp8:80")
WORKING = ("add:80", "add:86", "add:89", "add:90", "add:100", "add:120", "add.unaligned:80")
MULTIPLYING = ("matmul:80", "matmul:100", "matmul.fp8:89", "matmul.fp8:90")
BREAKING = ("spilling:80", "large:80", "tensor_memory:100", "described:100", "printing:80")
TOYS = (*FAILING, *WORKING, *MULTIPLYING, *BREAKING)


class ToyOutcome(msgspec.Struct, frozen=True):
    name: str
    sm: int
    kernel: CompiledKernel | None
    problem: str
    cached: bool


CompileToys = Callable[..., dict[str, ToyOutcome]]
