"""What the GPU executor refuses, and that it gives all back whatever fails; and that the fakes
which show it have nothing that the real libraries lack."""

import os
from typing import Any

import fake_cuda
import fake_tensorrt
import msgspec
import numpy as np
import pytest
from fake_cuda import FakeCuda, Status
from fake_tensorrt import FakeTensorRT
from plan_harness import NUM_BLOCKS, decode

from llmbuild.builder.targets.tensorrt import profiles
from llmbuild.builder.targets.tensorrt.limits import cache_name, updated_name
from llmbuild.errors import EngineError, UserError
from llmbuild.runtime.engine import Engine, check_servable
from llmbuild.runtime.executors import cuda, plan, rtx_memory, rtx_plan
from llmbuild.runtime.executors.open import open_executor
from llmbuild.runtime.executors.rtx import RtxExecutor
from llmbuild.runtime.manifest import Parallel


def test_too_little_memory_for_the_kv_cache_is_told_in_bytes(
    engine: Engine, trt: FakeTensorRT
) -> None:
    trt.gpu.size_bytes = 100_000
    slot_bytes = engine.manifest.kv.block_bytes
    with pytest.raises(EngineError, match="give less kv_memory") as error:
        RtxExecutor(engine, NUM_BLOCKS)
    assert f"{(NUM_BLOCKS - 1) * slot_bytes} bytes" in str(error.value)
    assert "6 sequences of 64 tokens, 100000 are left" in str(error.value)
    assert trt.gpu.is_empty


@pytest.mark.parametrize("call", ["cudaMalloc", "cudaMallocHost", "cudaMemsetAsync"])
def test_a_failure_while_opening_gives_all_back(
    engine: Engine, trt: FakeTensorRT, call: str
) -> None:
    trt.gpu.failing[call] = Status.cudaErrorIllegalAddress
    with pytest.raises(EngineError, match=f"{call} failed: cudaErrorIllegalAddress, a text"):
        RtxExecutor(engine, NUM_BLOCKS)
    assert trt.gpu.is_empty


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        ("deserialize", "can't be loaded: the plan is for another GPU"),
        ("context", "gives no execution context: TensorRT gave no reason"),
    ],
)
def test_what_tensorrt_refuses_is_told(
    engine: Engine, trt: FakeTensorRT, broken: str, message: str
) -> None:
    trt.broken = broken
    with pytest.raises(EngineError, match=message):
        RtxExecutor(engine, NUM_BLOCKS)
    assert trt.gpu.is_empty


@pytest.mark.parametrize(
    "call",
    [
        "cudaMemcpyAsync",
        "cudaStreamSynchronize",
        "cudaStreamBeginCapture",
        "cudaStreamEndCapture",
        "cudaGraphInstantiate",
        "cudaGraphLaunch",
    ],
)
def test_every_status_of_a_step_is_checked(engine: Engine, trt: FakeTensorRT, call: str) -> None:
    executor = RtxExecutor(engine, NUM_BLOCKS)
    trt.gpu.failing[call] = Status.cudaErrorIllegalAddress
    with pytest.raises(EngineError, match=f"{call} failed"):
        executor.step_greedy(decode({0: (0, 7)}), 3)
    trt.gpu.is_lost = True
    executor.close()


def test_a_failed_recording_is_ended(executor: RtxExecutor, trt: FakeTensorRT) -> None:
    executor.step_greedy(decode({0: (0, 7)}))
    begin = cuda.Cuda.begin_capture

    def breaking(self: Any) -> None:
        begin(self)
        trt.broken = "execute"

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cuda.Cuda, "begin_capture", breaking)
        with pytest.raises(EngineError, match="can't be executed"):
            executor.step_greedy(decode({0: (1, 7)}))
    assert trt.gpu.recording is None
    trt.gpu.graphs.clear()  # the fake's, of what was recorded by then
    trt.broken = ""
    executor.step_greedy(decode({0: (2, 7)}), 2)


def test_closing_twice_is_harmless_and_steps_are_over(engine: Engine, trt: FakeTensorRT) -> None:
    executor = RtxExecutor(engine, NUM_BLOCKS)
    executor.step_greedy(decode({0: (0, 7)}), 3)
    executor.close()
    assert trt.gpu.is_empty
    executor.close()
    with pytest.raises(AssertionError, match="closed"):
        executor.step(decode({0: (3, 7)}))


def test_a_fork_is_refused(executor: RtxExecutor, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(os, "getpid", lambda: -1)
        with pytest.raises(UserError, match="forked"):
            executor.step(decode({0: (0, 7)}))


def test_stages_are_refused(engine: Engine) -> None:
    parallel = Parallel(tp=1, pp=3)
    with pytest.raises(EngineError, match="3 stages, which can't be served on GPUs"):
        check_servable(msgspec.structs.replace(engine.manifest, parallel=parallel))


@pytest.mark.parametrize("options", [{"num_threads": 2}, {"pin_threads": True}])
def test_threads_are_not_for_a_gpu(engine: Engine, options: dict[str, Any]) -> None:
    with pytest.raises(UserError, match="leave them out"):
        open_executor(engine, NUM_BLOCKS, **options)


@pytest.mark.parametrize("is_greedy", [True, False])
def test_a_step_that_goes_wrong_leaves_no_nan_behind(
    executor: RtxExecutor, trt: FakeTensorRT, is_greedy: bool
) -> None:
    """What is masked is multiplied by 0: of a NaN that makes a NaN."""
    address, size = executor._memory._cache_base, executor.kv_bytes
    trt.gpu.view(address, size)[:] = 255  # NaN in fp16
    if is_greedy:
        assert executor.step_greedy(decode({0: (3, 7)}))[0][0] < 0
    else:
        assert not np.isfinite(executor.step(decode({0: (3, 7)}))).all()
    executor._cuda.synchronise()
    assert not trt.gpu.view(address, size).any()
    assert executor.step_greedy(decode({0: (0, 7)}))[0][0] >= 0


@pytest.mark.parametrize(
    ("shape", "message"),
    [(["B", 3, 63, 31], "must be a multiple of 256"), (["B", 3, 64, 32], "aren't those of")],
)
def test_a_manifest_that_is_not_the_plans_is_refused(
    engine: Engine, trt: FakeTensorRT, shape: list[int | str], message: str
) -> None:
    (rank,) = engine.manifest.ranks
    tensors = [
        msgspec.structs.replace(each, shape=shape) if each.name == "cache.0.k" else each
        for each in rank.plan_tensors
    ]
    tensors = tensors[: None if "multiple" in message else -1]
    changed = msgspec.structs.replace(rank, plan_tensors=tensors)
    manifest = msgspec.structs.replace(engine.manifest, ranks=[changed])
    with pytest.raises(EngineError, match=message):
        RtxExecutor(Engine(engine.root, manifest, "8.9"), NUM_BLOCKS)
    assert trt.gpu.is_empty


def test_what_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("tensorrt_rtx", "cuda.bindings.runtime"):
        monkeypatch.setitem(__import__("sys").modules, name, None)
    with pytest.raises(EngineError, match=r"TensorRT for RTX, .*pip install"):
        rtx_plan.load_tensorrt()
    with pytest.raises(EngineError, match=r"cuda-python 13, .*pip install"):
        cuda.load_bindings()


# What the fakes stand for


def test_the_builders_names_and_profiles_are_those_of_the_runtime() -> None:
    assert (profiles.CONTEXT, profiles.DECODE) == (plan.CONTEXT, plan.DECODE)
    assert updated_name(3, "k") == cache_name(3, "k") + rtx_memory.UPDATED


def test_cuda_python_has_every_call() -> None:
    runtime = pytest.importorskip("cuda.bindings.runtime")
    for name in fake_tensorrt.methods(FakeCuda):
        if name.startswith("cuda"):
            assert hasattr(runtime, name), name
    for kind in (fake_cuda.CopyKind, fake_cuda.CaptureMode):
        real = getattr(
            runtime, {"CopyKind": "cudaMemcpyKind"}.get(kind.__name__, "cudaStreamCaptureMode")
        )
        assert {each.name: each.value for each in kind}.items() <= {
            each.name: int(each) for each in real
        }.items()
    for status in Status:
        assert int(getattr(runtime.cudaError_t, status.name)) == status


def test_tensorrt_has_every_call() -> None:
    real = pytest.importorskip("tensorrt_rtx")
    for fake, name in (
        (fake_tensorrt.FakeRuntime, "Runtime"),
        (fake_tensorrt.FakeEngine, "ICudaEngine"),
        (fake_tensorrt.FakeContext, "IExecutionContext"),
        (fake_tensorrt.FakeConfig, "IRuntimeConfig"),
        (fake_tensorrt.FakeCache, "IRuntimeCache"),
    ):
        for method in fake_tensorrt.methods(fake):
            assert hasattr(getattr(real, name), method), f"{name}.{method}"
    for fake, name in (
        (fake_tensorrt.Specialization, "DynamicShapesKernelSpecializationStrategy"),
        (fake_tensorrt.Allocation, "ExecutionContextAllocationStrategy"),
    ):
        for member in fake:
            assert hasattr(getattr(real, name), member.name)
    assert "runtime_config" in real.ICudaEngine.create_execution_context.__doc__
    assert hasattr(real.IRuntimeConfig, "dynamic_shapes_kernel_specialization_strategy")
    assert hasattr(real.ICudaEngine, "num_io_tensors")
