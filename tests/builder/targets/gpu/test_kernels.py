"""Kernels compiled for an SM without a GPU: what comes out, and what the cache keeps."""

import os
import re
import shutil
import subprocess
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path

import pytest
from toy_outcome import WORKING, CompileToys, ToyOutcome

from llmbuild.builder.targets.gpu import kernels
from llmbuild.builder.targets.gpu.capabilities import CAPABILITIES
from llmbuild.builder.targets.gpu.compiled_kernel import (
    CompiledKernel,
    Resources,
    decode,
    encode,
    ptxas_figures,
)
from llmbuild.builder.targets.gpu.kernels import Outcome, Request, check_names, usable
from llmbuild.errors import BuildError, InternalError
from llmbuild.plugins.common.kernel_variant import KernelVariant

COMPILED = [*WORKING, "matmul:80", "matmul.fp8:90", "spilling:80", "printing:80"]

KERNEL = CompiledKernel("add", ".version 8.0", b"\x7fELF", Resources(26, 0, 0, 0, 0, 0, 0, 4))


@pytest.fixture(scope="module")
def nvidia_tool() -> Callable[..., str]:
    """nvidia_tool(name, *arguments): what a tool of Triton's prints."""
    package = find_spec("triton")
    assert package is not None
    assert package.origin is not None
    folder = Path(package.origin).parent / "backends" / "nvidia" / "bin"

    def run(name: str, *arguments: object) -> str:
        command = [str(folder / name), *map(str, arguments)]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        return done.stdout + done.stderr

    return run


def kernel_of(outcome: ToyOutcome) -> CompiledKernel:
    assert outcome.kernel is not None, outcome.problem
    return outcome.kernel


# What is compiled.


@pytest.mark.parametrize("name", WORKING)
def test_ptx_names_its_sm_and_the_version_of_the_oldest_driver(
    toys: Mapping[str, ToyOutcome], name: str
) -> None:
    outcome = toys[name]
    version = CAPABILITIES[outcome.sm].ptx_version
    ptx = kernel_of(outcome).ptx
    assert f"\n.version {version // 10}.{version % 10}\n" in ptx
    suffix = "a" if outcome.sm >= 90 else ""
    assert f"\n.target sm_{outcome.sm}{suffix}\n" in ptx
    assert outcome.problem == ""
    assert kernel_of(outcome).cubin.startswith(b"\x7fELF")


@pytest.mark.parametrize("name", COMPILED)
def test_figures_are_those_that_ptxas_and_cuobjdump_print(
    toys: Mapping[str, ToyOutcome],
    nvidia_tool: Callable[..., str],
    tmp_path: Path,
    name: str,
) -> None:
    outcome = toys[name]
    kernel, uses = kernel_of(outcome), kernel_of(outcome).resources
    (tmp_path / "kernel.ptx").write_text(kernel.ptx)
    (tmp_path / "kernel.cubin").write_bytes(kernel.cubin)
    ptxas = "ptxas-blackwell" if outcome.sm >= 90 else "ptxas"
    target = f"sm_{outcome.sm}" + ("a" if outcome.sm >= 90 else "")
    files = [tmp_path / "kernel.ptx", "-o", tmp_path / "again.cubin"]
    printed = nvidia_tool(ptxas, "-v", "--regAllocOptLevel=2", f"--gpu-name={target}", *files)
    stores, loads = re.findall(r"(\d+) bytes spill (?:stores|loads)", printed)
    assert uses.spilled_bytes == int(stores) + int(loads)

    usage = nvidia_tool("cuobjdump", "--dump-resource-usage", tmp_path / "kernel.cubin")
    assert f"Function {kernel.entry}:" in usage
    assert f"REG:{uses.registers} STACK:{uses.stack_bytes} " in usage


def test_shared_memory_is_that_of_the_tiles_in_flight(toys: Mapping[str, ToyOutcome]) -> None:
    # A tile of 32 x 32 items of two bytes for each operand; two stages have one of each in flight.
    assert kernel_of(toys["matmul:80"]).resources.shared_bytes == 2 * 32 * 32 * 2
    assert kernel_of(toys["add:80"]).resources.shared_bytes == 0


def test_promised_alignment_is_used(toys: Mapping[str, ToyOutcome]) -> None:
    wide = re.compile(r"ld\.global\.v[24]\.b32")
    assert wide.search(kernel_of(toys["add:80"]).ptx)
    assert not wide.search(kernel_of(toys["add.unaligned:80"]).ptx)


def test_fp8_products_are_the_tensor_cores(toys: Mapping[str, ToyOutcome]) -> None:
    assert "e4m3.e4m3" in kernel_of(toys["matmul.fp8:89"]).ptx


def test_ptx_has_no_path_of_this_machine(toys: Mapping[str, ToyOutcome]) -> None:
    for name in WORKING:
        kernel = kernel_of(toys[name])
        assert "toy_kernels" not in kernel.ptx
        assert b"toy_kernels" not in kernel.cubin


# What doesn't compile.


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("malformed:80", "no attribute 'no_such_function'"),
        ("deadly:80", "the compiler ended with SIGKILL"),
        ("unsupported:80", "Unsupported function referenced"),
        ("misnamed:80", "its signature names ['y'], its kernel ['x']"),
        ("matmul.fp8:80", "type fp8e4nv not supported in this architecture"),
    ],
)
def test_kernel_that_fails_is_named_and_hides_no_other(
    toys: Mapping[str, ToyOutcome], name: str, expected: str
) -> None:
    outcome = toys[name]
    assert outcome.kernel is None
    assert outcome.problem.startswith(f"kernel {outcome.name} for SM 80 doesn't compile: ")
    assert expected in outcome.problem
    assert toys["add:80"].problem == ""  # asked for after it


def test_problems_of_all_kernels_are_one_error() -> None:
    request = Request(KernelVariant("add", None, {}, {}, 4, 1), 80)  # type: ignore[arg-type]
    good = Outcome(request, KERNEL, "", cached=False)
    assert usable([good]) == [(request, KERNEL)]
    with pytest.raises(BuildError, match=r"^one is bad\ntwo is worse$"):
        usable(
            [
                Outcome(request, None, "one is bad", cached=False),
                good,
                Outcome(request, KERNEL, "two is worse", cached=False),
            ]
        )


def test_two_kernels_of_one_name_are_a_fault() -> None:
    request = Request(KernelVariant("add", None, {}, {}, 4, 1), 80)  # type: ignore[arg-type]
    check_names([request, Request(request.variant, 90)])
    with pytest.raises(InternalError, match="more than one kernel is called add"):
        check_names([request, request])


# The cache.


def test_second_run_compiles_nothing(compile_toys: CompileToys, tmp_path: Path) -> None:
    first = compile_toys("add:80", cache=tmp_path)["add:80"]
    second = compile_toys("add:80", "add:90", cache=tmp_path)
    assert not first.cached
    assert second["add:80"].cached
    assert second["add:80"].kernel == first.kernel
    assert not second["add:90"].cached


@pytest.fixture
def copy_toys(tmp_path: Path) -> Callable[..., Path]:
    """copy_toys(old="", new=""): compile_toys.py with toys in which a text has changed."""

    def copy(old: str = "", new: str = "") -> Path:
        here = Path(__file__).parent
        source = (here / "toy_kernels.py").read_text()
        assert old == "" or source.count(old) == 1
        (tmp_path / "toy_kernels.py").write_text(source.replace(old, new) if old else source)
        for name in ("compile_toys.py", "toy_outcome.py"):
            shutil.copy(here / name, tmp_path)
        return tmp_path / "compile_toys.py"

    return copy


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("tl.load(x + at, inside) + ", "tl.load(x + at, inside) - "),  # the kernel
        ("return x + x", "return x * x"),  # a function that it calls
        ('{"BLOCK": 1024}, 4, 1, tuple', '{"BLOCK": 512}, 4, 1, tuple'),
        ('{"BLOCK": 1024}, 4, 1, tuple', '{"BLOCK": 1024}, 2, 1, tuple'),
        ("tuple(_ADD)[:4]", "tuple(_ADD)[:3]"),
        ('"y": "*fp16", "out": "*fp16", "size"', '"y": "*bf16", "out": "*fp16", "size"'),
    ],
)
def test_change_of_what_is_compiled_misses_the_cache(
    compile_toys: CompileToys,
    toys: Mapping[str, ToyOutcome],
    toys_cache: Path,
    copy_toys: Callable[..., Path],
    old: str,
    new: str,
) -> None:
    script = copy_toys(old, new)
    changed = compile_toys("add:80", cache=toys_cache, script=script)["add:80"]
    assert not changed.cached
    assert kernel_of(changed).ptx != kernel_of(toys["add:80"]).ptx


def test_same_source_elsewhere_hits_the_cache(
    compile_toys: CompileToys,
    toys: Mapping[str, ToyOutcome],
    toys_cache: Path,
    copy_toys: Callable[..., Path],
) -> None:
    again = compile_toys("add:80", cache=toys_cache, script=copy_toys())["add:80"]
    assert again.cached
    assert again.kernel == toys["add:80"].kernel


def test_damaged_entry_is_compiled_again(compile_toys: CompileToys, tmp_path: Path) -> None:
    before = compile_toys("add:80", cache=tmp_path)["add:80"]
    (entry,) = (tmp_path / "kernels").iterdir()
    entry.write_bytes(entry.read_bytes()[:-1])
    after = compile_toys("add:80", cache=tmp_path)["add:80"]
    assert not after.cached
    assert after.kernel == before.kernel
    assert compile_toys("add:80", cache=tmp_path)["add:80"].cached


def test_killed_compile_leaves_nothing(compile_toys: CompileToys, tmp_path: Path) -> None:
    compile_toys("deadly:80", cache=tmp_path / "cache")
    assert not (tmp_path / "cache").exists()


def test_entry_that_isnt_whole_never_comes_into_being(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*paths: object) -> None:
        raise OSError("killed here")

    with monkeypatch.context() as patched:
        patched.setattr(os, "replace", refuse)
        with pytest.raises(OSError, match="killed here"):
            kernels._store(tmp_path / "entry", KERNEL)
    assert list(tmp_path.iterdir()) == []
    kernels._store(tmp_path / "entry", KERNEL)
    assert kernels._load(tmp_path / "entry") == KERNEL


@pytest.mark.parametrize("stored", [b"", b"short", encode(KERNEL)[:-1], b"x" + encode(KERNEL)[1:]])
def test_bytes_that_arent_an_entry_are_none(stored: bytes) -> None:
    assert decode(stored) is None
    assert decode(encode(KERNEL)) == KERNEL


def test_environment_changes_nothing_that_is_compiled(
    compile_toys: CompileToys,
    toys: Mapping[str, ToyOutcome],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("TRITON_FORCE_DISABLE_FP_FUSION", "TRITON_DEBUG", "DISABLE_PTXAS_OPT"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("PTXAS_OPTIONS", "--opt-level 0")
    outcome = compile_toys("add:90", cache=tmp_path)["add:90"]
    assert outcome.kernel == toys["add:90"].kernel


def test_ptxas_that_tells_nothing_is_a_fault() -> None:
    with pytest.raises(InternalError, match="ptxas didn't tell what a kernel uses"):
        ptxas_figures("ptxas info    : 0 bytes gmem")
