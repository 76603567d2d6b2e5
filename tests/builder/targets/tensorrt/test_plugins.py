"""What TensorRT would be given for our plugins, as far as that can be seen without it."""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

import pytest

from llmbuild.builder.targets.gpu.compiled_kernel import CompiledKernel, Resources
from llmbuild.builder.targets.gpu.kernels import Outcome, Request
from llmbuild.builder.targets.tensorrt import plugins
from llmbuild.builder.targets.tensorrt.build_paged import installed_tensorrt
from llmbuild.errors import BuildError
from llmbuild.plugins.common.kernel_variant import KernelVariant

SMS = (80, 100)
NO_KERNEL: Any = None
VARIANT = KernelVariant("kernel", NO_KERNEL, {}, {}, num_warps=4, num_stages=2)


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """By SM and plugin."""
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    env["LLMBUILD_CACHE"] = str(tmp_path_factory.mktemp("cache"))
    script = Path(__file__).with_name("compile_plugins.py")
    command = [sys.executable, str(script), *map(str, SMS)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


@pytest.mark.parametrize("sm", [str(sm) for sm in SMS])
def test_a_kernels_parameters_are_what_tensorrt_passes(told: dict[str, Any], sm: str) -> None:
    """Tensors and integers, and Triton's two scratch areas."""
    for plugin in told[sm].values():
        for kernel in plugin["kernels"]:
            assert kernel["is_entry"]
            assert kernel["pointers"] == plugin["tensors"] + 2
            assert kernel["integers"] == len(kernel["given"])
            assert kernel["shared"] <= 48 * 1024


def test_outputs_follow_from_the_inputs_shapes(told: dict[str, Any]) -> None:
    outputs = {name: plugin["outputs"] for name, plugin in told["80"].items()}
    assert outputs == {
        "rope_kv_write": [["float16", [37, 576]], ["int32", [1]]],
        "decode": [["float32", [5, 9, 8, 64]], ["float32", [5, 9, 8, 2]]],
        "prefill": [["float16", [37, 576]]],
        "linear": [["float16", [37, 96]]],
    }


def test_grids_follow_from_the_inputs_shapes(told: dict[str, Any]) -> None:
    grids = {
        name: [kernel["grid"] for kernel in plugin["kernels"]]
        for name, plugin in told["80"].items()
    }
    assert grids["rope_kv_write"] == [[10, 12, 1]]
    assert grids["decode"] == [[5, 3, 8]]
    assert grids["prefill"] == [[37 // 21 + 5, 3, 1]]
    assert grids["linear"] == [[2, 3, 1], [2, 1, 1], [12, 10, 1]]


def test_only_linears_have_several_tactics(told: dict[str, Any]) -> None:
    counts = {name: len(plugin["kernels"]) for name, plugin in told["80"].items()}
    assert counts == {"rope_kv_write": 1, "decode": 1, "prefill": 1, "linear": 3}
    assert told["80"]["linear"]["types"] == "FP16, INT8, FP16, FP16"


def test_integers_stand_in_the_kernels_order(told: dict[str, Any]) -> None:
    given = {name: plugin["kernels"][0]["given"] for name, plugin in told["80"].items()}
    assert given["rope_kv_write"] == given["prefill"] == [5, 9]
    assert given["decode"] == [9]
    assert [kernel["given"] for kernel in told["80"]["linear"]["kernels"]] == [
        [37, 96, 128],
        [37, 96, 128],
        [37, 96, 16],
    ]


class StandInCompiler:
    """Kernels of which some break a gate. working: warps and stages of those that don't."""

    def __init__(self, working: set[tuple[int, int]]) -> None:
        self.working = working

    def __call__(self, requests: Sequence[Request]) -> list[Outcome]:
        return [self.outcome(request) for request in requests]

    def outcome(self, request: Request) -> Outcome:
        warps, stages = request.variant.num_warps, request.variant.num_stages
        resources = Resources(64, 0, 0, 0, 0, 0, 0, warps)
        kernel = CompiledKernel(f"{warps} warps, {stages} stages", "", b"", resources)
        problem = "" if (warps, stages) in self.working else f"{warps} warps spill"
        return Outcome(request, kernel, problem, cached=False)


@pytest.mark.parametrize(
    ("working", "entry"),
    [
        ({(4, 2), (8, 2)}, "4 warps, 2 stages"),
        ({(8, 2), (4, 1)}, "8 warps, 2 stages"),
        ({(4, 1)}, "4 warps, 1 stages"),
    ],
)
def test_a_kernel_that_breaks_a_gate_is_tried_in_other_ways(
    monkeypatch: pytest.MonkeyPatch, working: set[tuple[int, int]], entry: str
) -> None:
    monkeypatch.setattr(plugins, "compile_kernels", StandInCompiler(working))
    (kernel,) = plugins._compiled([VARIANT], 80)
    assert kernel.entry == entry


def test_a_kernel_that_breaks_a_gate_in_every_way_is_an_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(plugins, "compile_kernels", StandInCompiler(set()))
    with pytest.raises(BuildError, match=r"^4 warps spill$"):
        plugins._compiled([VARIANT], 80)


def install(folder: Path, version: str) -> None:
    """A package that says it is TensorRT."""
    package = folder / "tensorrt"
    package.mkdir()
    (package / "__init__.py").write_text(f"__version__ = {version!r}\n")
    (package / "plugin.py").write_text("")


@pytest.fixture
def no_tensorrt(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A folder from which packages are imported, and no TensorRT."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "tensorrt"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.setattr(sys, "meta_path", [PathFinder])
    return tmp_path


@pytest.mark.parametrize("version", ["10.14.1", "8.6.0"])
def test_older_releases_are_refused(no_tensorrt: Path, version: str) -> None:
    install(no_tensorrt, version)
    with pytest.raises(BuildError, match=rf"can't use TensorRT {version}; install TensorRT 11"):
        installed_tensorrt()
    for name in ("tensorrt.plugin", "tensorrt"):
        del sys.modules[name]


def test_without_tensorrt_the_error_says_what_to_install(no_tensorrt: Path) -> None:
    with pytest.raises(BuildError, match=r"pip install '\.\[build,tensorrt\]'"):
        installed_tensorrt()
