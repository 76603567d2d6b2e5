"""Each gate refuses the kernel made to break it, and names the value and the limit."""

import re
from collections.abc import Mapping

import msgspec
import pytest
from toy_outcome import ToyOutcome

from llmbuild.builder.targets.gpu.compiled_kernel import CompiledKernel, Resources
from llmbuild.builder.targets.gpu.gates import broken_gates

PTX = ".version 8.0\n.target sm_80\n.address_size 64\n.extern .shared .align 16 .b8 shared[];\n"
FRUGAL = Resources(
    registers=255,
    stack_bytes=0,
    spilled_bytes=0,
    shared_bytes=48 * 1024,
    tensor_memory_columns=0,
    global_scratch_bytes=0,
    profile_scratch_bytes=0,
    num_warps=4,
)
KERNEL = CompiledKernel("kernel", PTX, b"", FRUGAL)


def test_kernel_at_every_limit_passes() -> None:
    assert broken_gates(80, KERNEL) == []


@pytest.mark.parametrize(
    ("figure", "value", "expected"),
    [
        ("spilled_bytes", 1, "spills 1 bytes a thread, of 0 at most"),
        ("shared_bytes", 49153, "takes 49153 bytes of shared memory, of 49152 at most"),
        ("tensor_memory_columns", 32, "takes 32 columns of tensor memory, of 0 at most"),
        ("global_scratch_bytes", 128, "takes 128 bytes of global scratch, of 0 at most"),
        ("profile_scratch_bytes", 8, "takes 8 bytes of profile scratch, of 0 at most"),
    ],
)
def test_figure_beyond_its_limit_is_told(figure: str, value: int, expected: str) -> None:
    wasteful = msgspec.structs.replace(FRUGAL, **{figure: value})
    kernel = msgspec.structs.replace(KERNEL, resources=wasteful)
    assert broken_gates(80, kernel) == [expected]


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("8.0", "8.1", "is PTX 8.1, of 8.0 at most for driver R525"),
        ("8.0", "9.4", "is PTX 9.4, of 8.0 at most for driver R525"),
        ("sm_80", "sm_86", "is PTX for sm_86 instead of sm_80"),
        (
            ".extern .shared",
            ".extern .func  (.param .b32 func_retval0) vprintf\n(\n);\n.extern .shared",
            "calls vprintf, which nothing defines",
        ),
        (
            ".extern .shared",
            ".extern .func helper\n(\n\t.param .b32 x\n);\n.extern .shared",
            "calls helper, which nothing defines",
        ),
    ],
)
def test_ptx_that_a_driver_would_refuse_is_told(old: str, new: str, expected: str) -> None:
    assert PTX.count(old) == 1
    kernel = msgspec.structs.replace(KERNEL, ptx=PTX.replace(old, new))
    assert broken_gates(80, kernel) == [expected]


def test_every_broken_gate_is_told() -> None:
    wasteful = msgspec.structs.replace(FRUGAL, spilled_bytes=4, shared_bytes=65536)
    broken = broken_gates(80, CompiledKernel("kernel", "", b"", wasteful))
    assert len(broken) == 4


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("spilling:80", r"kernel spilling for SM 80 spills \d+ bytes a thread, of 0 at most"),
        ("large:80", "takes 65536 bytes of shared memory, of 49152 at most"),
        ("tensor_memory:100", r"takes \d+ columns of tensor memory, of 0 at most"),
        ("described:100", r"takes \d+ bytes of global scratch, of 0 at most"),
        ("printing:80", "calls vprintf, which nothing defines"),
    ],
)
def test_compiled_kernel_that_breaks_a_gate_is_a_problem(
    toys: Mapping[str, ToyOutcome], name: str, expected: str
) -> None:
    assert toys[name].kernel is not None
    assert re.search(expected, toys[name].problem)
    assert ";" not in toys[name].problem  # this gate alone
