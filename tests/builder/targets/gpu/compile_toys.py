"""Compiles toys, named on the command line as NAME:SM, in a process of its own: one that has set
TRITON_INTERPRET can't. Prints their outcomes as JSON."""

import sys

import msgspec
from toy_kernels import TOYS
from toy_outcome import ToyOutcome

from llmbuild.builder.targets.gpu.kernels import Request, compile_kernels

if __name__ == "__main__":
    wanted = [argument.split(":") for argument in sys.argv[1:]]
    outcomes = compile_kernels([Request(TOYS[name], int(sm)) for name, sm in wanted])
    toys = [
        ToyOutcome(name, int(sm), done.kernel, done.problem, done.cached)
        for (name, sm), done in zip(wanted, outcomes, strict=True)
    ]
    sys.stdout.buffer.write(msgspec.json.encode(toys))
