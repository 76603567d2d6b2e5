"""The benchmark of GPU kernels up to the launch: arguments, grids, buffers and references, with a
driver that runs the same launches in Triton's interpreter. Nothing here has run on a GPU."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

pytest.importorskip("triton")

import fake_driver
from fake_driver import CUresult, FakeDriver

from bench import report
from bench.gpu import __main__ as command
from bench.gpu import cases, device, measure
from bench.gpu.arguments import Packed
from bench.gpu.attention_cases import attention_type, choose_splits, decode_case, prefill_case
from bench.gpu.case import Case, given, normal, wrong
from bench.gpu.device import Gpu
from bench.gpu.linear_cases import linear_case
from bench.gpu.measure import Bench, Timing, copy_bytes_per_s
from llmbuild.builder.targets.gpu.capabilities import CAPABILITIES
from llmbuild.builder.targets.gpu.compiled_kernel import CompiledKernel, Resources
from llmbuild.builder.targets.gpu.kernels import Outcome, Request
from llmbuild.errors import InternalError, UserError
from llmbuild.plugins.common.attention_variant import LLAMA_8B, SMOLLM2
from llmbuild.plugins.common.weight_format import INT4

SM = 89
# The interpreter's numpy, of sequences and columns that aren't there.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


def right_in_the_interpreter(case: Case) -> bool:
    """Its dots of bf16 are wrong."""
    has_dots = case.kernel.startswith(("paged_attention", "quantised_gemm"))
    return not (has_dots and "bf16" in case.what)


CHECKED = [case for case in cases.check_cases(SM) if right_in_the_interpreter(case)]
# Instead of those in bf16 of the same KV dtypes, which no variant is built for.
IN_FP16 = [
    made
    for of in (attention_type(SMOLLM2, "fp16", dtype) for dtype in ("int8", "int4"))
    for made in (decode_case(SM, of, 3, 275, 8), prefill_case(SM, of, 37))
]


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "COLD_BYTES", 1 << 20)
    monkeypatch.setattr(measure, "COPY_BYTES", 1 << 20)
    monkeypatch.setattr(measure, "MAX_COPIES", 3)


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeDriver]:
    known = cases.variants_of([*cases.check_cases(SM), *IN_FP16])
    made = FakeDriver({each.name: each for each in known})
    monkeypatch.setattr(device, "load_bindings", lambda: made)
    yield made
    assert not made.memory


def as_compiled(case: Case, shared_bytes: int = 0) -> dict[str, CompiledKernel]:
    """Kernels of which the fake driver knows the name."""
    resources = Resources(32, 0, 0, shared_bytes, 0, 0, 0, 4)
    return {
        each.name: CompiledKernel(
            each.kernel.__name__,  # type: ignore[attr-defined]
            "",
            each.name.encode(),
            resources,
        )
        for each in cases.variants_of([case])
    }


def compile_nothing(
    requests: Sequence[Request], on_done: Callable[[Outcome], None]
) -> list[Outcome]:
    resources = Resources(32, 0, 0, 0, 0, 0, 0, 4)
    outcomes = []
    for request in requests:
        name = request.variant.name
        entry = request.variant.kernel.__name__  # type: ignore[attr-defined]
        kernel = CompiledKernel(entry, "", name.encode(), resources)
        outcomes.append(Outcome(request, kernel, "", cached=False))
        on_done(outcomes[-1])
    return outcomes


@pytest.mark.parametrize("case", [*CHECKED, *IN_FP16], ids=lambda case: case.name)
def test_kernels_give_torchs_result_from_the_arguments_of_a_launch(
    case: Case, driver: FakeDriver
) -> None:
    assert Bench(Gpu(), as_compiled(case)).check(case) == ""
    assert driver.calls["cuLaunchKernel"] == len(case.launches)


def test_every_kernel_that_is_timed_is_checked() -> None:
    timed = cases.timed_cases(SM, 100, [1, 2, 16, 64], [1024])
    names = {variant.name for variant in cases.variants_of(timed)}
    assert names == {variant.name for variant in cases.variants_of(cases.check_cases(SM))}


@pytest.mark.parametrize("sm", CAPABILITIES)
def test_every_launch_has_its_arguments_and_a_grid(sm: int) -> None:
    timed = cases.timed_cases(sm, 100, [1, 3, 64], [1024, 32_768])
    for case in [*cases.check_cases(sm), *timed]:
        assert 0 < case.moved_bytes <= case.size_bytes
        assert {*case.results} <= {*case.buffers}
        for launch in case.launches:
            values = {
                name: 4096 if isinstance(value, str) else value
                for name, value in launch.arguments.items()
            }
            Packed(launch.variant, values)
            used = [value for value in launch.arguments.values() if isinstance(value, str)]
            assert {*used} <= {*case.buffers}
            assert all(size >= 1 for size in launch.grid)
            assert all(size <= 65535 for size in launch.grid[1:])


def test_a_launch_without_an_argument_is_found() -> None:
    (launch,) = CHECKED[0].launches
    values = dict.fromkeys(launch.arguments, 4096)
    Packed(launch.variant, values)
    with pytest.raises(AssertionError, match="scales"):
        Packed(launch.variant, {n: v for n, v in values.items() if n != "scales"})
    with pytest.raises(AssertionError, match="16 divides x"):
        Packed(launch.variant, values | {"x": 4097})


@pytest.mark.parametrize("number", [0, -1])
def test_a_wrong_result_is_found(number: int, driver: FakeDriver) -> None:
    case = CHECKED[number]
    right = case.competitor
    case = replace(case, competitor=lambda t: lambda: tuple(-each for each in right(t)()))
    assert "differs by" in Bench(Gpu(), as_compiled(case)).check(case)


def test_what_is_no_number_is_wrong() -> None:
    want = torch.tensor([1.0, 2.0])
    for second, found in (
        (torch.nan, "has what is no number"),
        (2.1, ""),
        (2.3, "differs by 0.3, of 0.2 allowed"),
    ):
        assert wrong((want, torch.tensor([1.0, second])), (want, want), 0.1) == found


def test_memory_has_the_pattern_that_the_reference_sees(driver: FakeDriver) -> None:
    gpu = Gpu()
    for buffer in (given(torch.arange(3)), replace(given(torch.arange(7)), shape=(5, 9))):
        address = gpu.allocate(buffer.size_bytes)
        gpu.fill(address, buffer.size_bytes, buffer.pattern)
        content = gpu.read(address, buffer.size_bytes)
        assert content == buffer.host().numpy().tobytes()
        gpu.free(address)


def test_large_data_repeats_itself() -> None:
    buffer = normal(torch.float16, 1000, 4096)
    assert len(buffer.pattern) < buffer.size_bytes / 3
    assert buffer.host().shape == (1000, 4096)


def test_times_are_a_graphs_over_the_copies_in_it(driver: FakeDriver) -> None:
    case = linear_case(SM, "fp16", INT4, 192, 144, 1)
    timing = Bench(Gpu(), as_compiled(case)).time(case)
    assert driver.graphs == [3]  # MAX_COPIES
    assert timing.seconds == pytest.approx(0.5e-3 / 3)
    assert timing.bytes_per_s == pytest.approx(case.moved_bytes / timing.seconds)
    assert timing.torch_seconds is None
    assert case.moved_bytes == 192 * 2 + 144 * 96 + 144 * 3 * 2 + 144 * 2


def test_what_does_not_fit_is_left_out(driver: FakeDriver) -> None:
    of = attention_type(LLAMA_8B, "bf16", "bf16")
    case = decode_case(SM, of, 64, 32_768, 100)
    assert case.size_bytes > 8e9
    assert Bench(Gpu(), as_compiled(case)).time(case).seconds is None
    assert not driver.calls["cuMemAlloc"]


def test_a_copy_reads_and_writes(driver: FakeDriver) -> None:
    assert copy_bytes_per_s(Gpu()) == pytest.approx(2 * (1 << 20) / 0.5e-3)


@pytest.mark.parametrize(("batch", "context", "splits"), [(1, 64, 1), (1, 4096, 32), (64, 4096, 1)])
def test_splits_fill_the_gpu(batch: int, context: int, splits: int) -> None:
    of = attention_type(LLAMA_8B, "bf16", "bf16")
    assert choose_splits(of, batch, context, 64, 100) == splits


def test_more_shared_memory_is_asked_for(driver: FakeDriver) -> None:
    case = CHECKED[0]
    Bench(Gpu(), as_compiled(case, 48 * 1024))
    assert not driver.shared_allowed
    Bench(Gpu(), as_compiled(case, 50_000))
    assert [*driver.shared_allowed.values()] == [50_000]


# The command


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> list[Case]:
    """Cases that are quick, and no compiler."""
    quick = ("rms_norm fp16", "gated_activation fp16")
    some = [case for case in CHECKED if case.name.startswith(quick)]
    monkeypatch.setattr(cases, "check_cases", lambda sm: some)
    monkeypatch.setattr(cases, "timed_cases", lambda *_: some)
    monkeypatch.setattr(command, "compile_kernels", compile_nothing)
    monkeypatch.setattr(command, "require_triton", lambda: None)
    return some


def test_the_command_prints_a_table_and_writes_json(
    driver: FakeDriver, few: list[Case], tmp_path: Path
) -> None:
    path = tmp_path / "gpu.json"
    done = CliRunner().invoke(command.main, ["--json", str(path)])
    assert done.exit_code == 0, done.output
    assert "Fake GPU (SM 89)" in done.stdout
    assert "copy: 4 GB/s before, 4 GB/s after" in done.stdout
    lines = done.stdout.splitlines()
    (norm,) = (line.split() for line in lines if line.startswith("rms_norm"))
    assert norm[:5] == ["rms_norm", "fp16", "4096", "3", "-"]
    assert norm[-3:] == ["-", "-", "-"]  # no torch with CUDA here
    record = json.loads(path.read_text())
    assert record["checked"] == len(record["timings"]) == len(few)
    assert record["timings"][0]["kernel"] == few[0].kernel
    assert record["timings"][0]["seconds"] > 0


def test_wrong_results_end_it(
    driver: FakeDriver, few: list[Case], monkeypatch: pytest.MonkeyPatch
) -> None:
    def negative(case: Case) -> Case:
        return replace(
            case, competitor=lambda t: lambda: tuple(-each for each in case.competitor(t)())
        )

    monkeypatch.setattr(cases, "check_cases", lambda sm: [negative(case) for case in few])
    error = CliRunner().invoke(command.main, []).exception
    assert isinstance(error, InternalError)
    assert "rms_norm fp16 4096, 3 rows: differs by" in str(error)


def test_figures_stand_beside_torchs() -> None:
    timing = Timing("k", "w", 4, 1024, 2_000_000, 1e-5, 2e-5)
    none = Timing("k", "w", 64, 32_768, 10**10, None)
    bad = replace(timing, problem="differs")
    result = command.GpuReport("G", 90, "", {}, (4e11, 3e11), 1, [timing, none, bad])
    _, _, first, second, third = command.table(result).splitlines()
    assert first.split() == ["k", "w", "4", "1024", "10", "200", "50%", "20", "2", "right"]
    assert second.split() == ["k", "w", "64", "32768", "-", "-", "-", "-", "-", "no", "memory"]
    assert third.split()[-1] == "differs"


def ends_with(arguments: Sequence[str], capsys: pytest.CaptureFixture[str]) -> str:
    """The one line of a command that the user has to mend something for."""
    with pytest.raises(SystemExit) as ended:
        report.run(lambda: command.main(list(arguments), standalone_mode=False))  # type: ignore[arg-type]
    assert ended.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    return line


def test_without_a_driver_it_says_so_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(name: str) -> None:
        raise OSError(name)

    pytest.importorskip("cuda.bindings.driver")
    monkeypatch.setattr("ctypes.CDLL", fail)
    assert "an NVIDIA GPU and its driver are needed" in ends_with([], capsys)
    monkeypatch.setitem(sys.modules, "cuda.bindings.driver", None)
    assert "cuda-python 13 is missing" in ends_with([], capsys)


def test_without_a_gpu_it_says_so_in_one_line(
    driver: FakeDriver, capsys: pytest.CaptureFixture[str]
) -> None:
    driver.sm = 75
    assert "Fake GPU is SM 75, and kernels are built for SM 80" in ends_with([], capsys)
    driver.failing["cuInit"] = CUresult.CUDA_ERROR_NO_DEVICE
    assert "refused cuInit: CUDA_ERROR_NO_DEVICE" in ends_with([], capsys)


def test_unknown_names_are_refused(few: list[Case], capsys: pytest.CaptureFixture[str]) -> None:
    assert "no case has 'x y'" in ends_with(["--compile-only", "90", "--only", "x y"], capsys)
    assert "SM 91; known: 80" in ends_with(["--compile-only", "91"], capsys)
    both = ["--compile-only", "90", "--json", "x.json"]
    assert "--compile-only measures nothing" in ends_with(both, capsys)
    for option in ("--batches", "--contexts"):
        for value in ("9" * 5000, "1,0", "x", ""):
            done = CliRunner().invoke(command.main, [option, value])
            assert done.exit_code == 2
            assert "isn't numbers of at most 6 digits" in " ".join(done.output.split())
    with pytest.raises(UserError, match="doesn't exist"):
        CliRunner().invoke(command.main, ["--json", "/none/x.json"], catch_exceptions=False)


def test_kernels_compile_without_a_gpu(checkout: Path, tmp_path: Path) -> None:
    environment = os.environ | {"LLMBUILD_CACHE": str(tmp_path)}
    del environment["TRITON_INTERPRET"]
    arguments = ["--compile-only", "90", "--only", "best_of_parts"]
    done = subprocess.run(
        [sys.executable, "-m", "bench.gpu", *arguments],
        cwd=checkout,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout == "2 kernels compile for SM 90: 7 cases; none was run\n", done.stderr


def test_cuda_python_has_every_call() -> None:
    real: Any = pytest.importorskip("cuda.bindings.driver")
    for name in vars(FakeDriver):
        if name.startswith("cu"):
            assert hasattr(real, name), name
    for kind in (
        fake_driver.CUdevice_attribute,
        fake_driver.CUfunction_attribute,
        fake_driver.CUstream_flags,
        fake_driver.CUstreamCaptureMode,
        CUresult,
    ):
        for member in kind:
            assert int(getattr(getattr(real, kind.__name__), member.name)) == member
