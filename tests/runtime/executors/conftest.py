"""Makes the fakes of a GPU importable, and engines that are run on them."""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from fake_cuda import FakeCuda
from fake_tensorrt import FakeTensorRT
from plan_harness import NUM_BLOCKS, Compiled

from llmbuild.builder import rtx_plans
from llmbuild.builder.compile import compile
from llmbuild.builder.targets.tensorrt.built_plan import shapes_of
from llmbuild.builder.targets.tensorrt.emulation.emulate import emulate
from llmbuild.builder.targets.tensorrt.profiles import profiles
from llmbuild.runtime import engine as engine_module
from llmbuild.runtime.engine import Engine, open_engine
from llmbuild.runtime.executors import cuda, rtx_plan
from llmbuild.runtime.executors.rtx import RtxExecutor


@pytest.fixture(scope="session")
def compile_as(
    tmp_path_factory: pytest.TempPathFactory, save_tiny_llama: Callable[..., Path]
) -> Callable[[str], Compiled]:
    """compile_as(precision)"""
    folder = tmp_path_factory.mktemp("rtx")
    sizes = {"head_dim": 32, "hidden_size": 64, "intermediate_size": 96, "num_key_value_heads": 3}
    recipe = save_tiny_llama(folder, **sizes)
    lines = recipe.read_text().splitlines()
    lines = [line for line in lines if not line.startswith("kv_cache")]
    recipe.write_text("\n".join([*lines, "target: {kind: tensorrt-rtx, capabilities: [8.9]}"]))
    build_plan = rtx_plans.build_plan

    def build(precision: str) -> Compiled:
        made: list[Any] = []

        def recording(*arguments: Any) -> Any:
            made.extend(arguments)
            made.append(emulate(*arguments[:5]))
            return build_plan(*arguments)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(rtx_plans, "build_plan", recording)
            root = compile(recipe, folder / precision, [f"precision={precision}"])
        step, config, limits, _, read, _, emulated = made
        return Compiled(root, config, emulated, step, read, limits)

    return build


@pytest.fixture(scope="session")
def compiled(compile_as: Callable[[str], Compiled]) -> Compiled:
    return compile_as("fp16")


@pytest.fixture
def fakes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[Compiled], FakeTensorRT]:
    """Puts fakes that run an engine in place of what is imported."""

    def put(compiled: Compiled) -> FakeTensorRT:
        gpu = FakeCuda()
        shapes = shapes_of(compiled.emulated.lowering.inputs)
        made = FakeTensorRT(gpu, compiled.emulated, profiles(shapes, compiled.limits))
        version = rtx_plans.installed_tensorrt_rtx().__version__
        monkeypatch.setattr(engine_module, "compute_capability", lambda: "8.9")
        monkeypatch.setattr(engine_module, "rtx_version", lambda: version)
        monkeypatch.setattr(cuda, "load_bindings", lambda: gpu)
        monkeypatch.setattr(rtx_plan, "load_tensorrt", lambda: made)
        monkeypatch.setenv("LLMBUILD_CACHE", str(tmp_path / "cache"))
        return made

    return put


@pytest.fixture
def trt(compiled: Compiled, fakes: Callable[[Compiled], FakeTensorRT]) -> FakeTensorRT:
    """Of `compiled`; `.gpu` is the GPU."""
    return fakes(compiled)


@pytest.fixture
def engine(compiled: Compiled, trt: FakeTensorRT) -> Engine:
    return open_engine(compiled.root)


@pytest.fixture
def executor(engine: Engine, trt: FakeTensorRT) -> Iterator[RtxExecutor]:
    made = RtxExecutor(engine, NUM_BLOCKS)
    yield made
    made.close()
    assert trt.gpu.is_empty
