"""Engines of TensorRT on a GPU that isn't there: the executor's own code runs, against fakes that
hold it to the rules of CUDA and TensorRT and compute with the emulated network, its plugins in
Triton's interpreter. TensorRT never met it, nor did a GPU."""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from fake_cuda import FakeCuda
from fake_paged import FakePagedTensorRT
from fake_tensorrt import FakeContext, FakeEngine, FakeRuntime, methods
from plan_harness import Compiled, decode, prefill, reference_tokens

sys.path.append(str(Path(__file__).parents[2] / "builder/targets/tensorrt"))

from stand_in_tensorrt import interpreting_machine, save_recipe

from llmbuild import LLM, SamplingParams
from llmbuild.builder import paged_plans
from llmbuild.builder.compile import compile
from llmbuild.builder.targets.tensorrt.build_paged import build_paged_plan
from llmbuild.builder.targets.tensorrt.built_plan import shapes_of
from llmbuild.builder.targets.tensorrt.emulation.emulate import emulate_paged
from llmbuild.builder.targets.tensorrt.paged_profiles import paged_profiles
from llmbuild.errors import EngineError
from llmbuild.runtime import engine as engine_module
from llmbuild.runtime.batch import StepBatch
from llmbuild.runtime.engine import Engine, check_servable, open_engine
from llmbuild.runtime.executors import cuda
from llmbuild.runtime.executors import tensorrt as tensorrt_module
from llmbuild.runtime.executors.tensorrt import TensorrtExecutor
from llmbuild.runtime.manifest import Parallel
from llmbuild.runtime.replay import STEPS_FILE, load_steps, relative_difference, replay

NUM_BLOCKS = 40
PROMPTS = [[7, 200, 31], [5], list(range(40, 70))]

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, where a row is padding


@pytest.fixture(scope="module")
def compiled(
    tmp_path_factory: pytest.TempPathFactory, save_tiny_llama: Callable[..., Path]
) -> Compiled:
    folder, made = tmp_path_factory.mktemp("tensorrt"), list[Any]()

    def recording(*arguments: Any) -> Any:
        made.extend(arguments)
        return build_paged_plan(*arguments)

    with interpreting_machine(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(paged_plans, "build_paged_plan", recording)
        root = compile(save_recipe(folder, save_tiny_llama), folder / "engine")
    step, config, limits, _, read, _ = made
    return Compiled(root, config, emulate_paged(*made[:5]), step, read, limits)


@pytest.fixture
def trt(compiled: Compiled, monkeypatch: pytest.MonkeyPatch) -> FakePagedTensorRT:
    """In place of what is imported; `.gpu` is the GPU."""
    gpu = FakeCuda()
    shapes = shapes_of(compiled.emulated.lowering.inputs)
    made = FakePagedTensorRT(gpu, compiled.emulated, paged_profiles(shapes, compiled.limits))
    monkeypatch.setattr(engine_module, "compute_capability", lambda: "8.9")
    monkeypatch.setattr(engine_module, "tensorrt_version", lambda: made.__version__)
    monkeypatch.setattr(cuda, "load_bindings", lambda: gpu)
    monkeypatch.setattr(tensorrt_module, "load_tensorrt", lambda: made)
    return made


@pytest.fixture
def engine(compiled: Compiled, trt: FakePagedTensorRT) -> Engine:
    return open_engine(compiled.root)


@pytest.fixture
def executor(engine: Engine, trt: FakePagedTensorRT) -> Iterator[TensorrtExecutor]:
    made = TensorrtExecutor(engine, NUM_BLOCKS)
    yield made
    made.close()
    assert trt.gpu.is_empty


def test_an_llm_gives_the_references_tokens(compiled: Compiled, trt: FakePagedTensorRT) -> None:
    """A prompt in chunks, others beside it; blocks of four tokens, of which there are too few for
    all at once."""
    params = SamplingParams(max_tokens=6, ignore_eos=True)
    with LLM(compiled.root, num_blocks=11) as llm:
        done = llm.generate(PROMPTS, params)
        assert trt.gpu.calls["cudaGraphLaunch"] > 0
        llm.check()
    for prompt, completion in zip(PROMPTS, done, strict=True):
        assert completion.error is None
        assert list(completion.token_ids) == reference_tokens(compiled, prompt, 6)
    assert trt.gpu.is_empty


def test_verify_replays_its_steps(engine: Engine) -> None:
    steps = load_steps(engine.root / STEPS_FILE)
    for got, want in zip(replay(engine, steps), steps.logits, strict=True):
        assert relative_difference(got[:, steps.columns], want) <= steps.tolerance


def test_a_bucket_is_recorded_at_its_second_time_and_launched_after(
    executor: TensorrtExecutor, trt: FakePagedTensorRT
) -> None:
    """Whichever blocks its sequences have."""
    counts = executor.graph_counts
    for position, slot in enumerate((0, 5, 0, 2)):
        executor.step_greedy(decode({slot: (position % 4, 7)}))
        assert counts.recorded == (position >= 1)
        assert counts.launched == trt.gpu.calls["cudaGraphLaunch"] == max(0, position - 1)
    assert counts.hit_rate == 2 / 4
    executor.step_greedy(decode({0: (1, 7), 1: (0, 7)}), 3)  # a bucket of 2
    assert (counts.recorded, counts.launched) == (2, 3)
    executor.step_greedy(decode({0: (1, 7), 1: (0, 7), 7: (2, 3)}), 2)  # as many as a step may have
    assert counts.recorded == 3


def test_several_greedy_steps_are_those_of_one_each(
    executor: TensorrtExecutor, compiled: Compiled
) -> None:
    (first,) = executor.step_greedy(prefill([3], 6))
    rows = executor.step_greedy(decode({6: (1, first[0])}), 3)
    assert [*first, *rows[0]] == reference_tokens(compiled, [3], 4)


def test_more_rows_of_logits_than_a_plan_gives_take_several_executions(
    executor: TensorrtExecutor,
) -> None:
    tokens = [3, 5, 8, 9]
    every = with_rows(prefill(tokens, 0), [0, 1, 2, 3])
    logits = executor.step(every)
    assert logits.shape == (4, 257)
    for count in (1, 2):
        np.testing.assert_array_equal(
            executor.step(prefill(tokens[:count], 1))[0], logits[count - 1]
        )


def test_a_step_without_logits(executor: TensorrtExecutor) -> None:
    quiet = with_rows(prefill([4, 5, 6], 0), [])
    assert executor.step(quiet).shape == (0, 257)
    assert executor.step_greedy(quiet) == []


def test_what_a_pool_held_before_is_not_read(
    executor: TensorrtExecutor, trt: FakePagedTensorRT
) -> None:
    """Nor what a step that went wrong has left there."""
    first = executor.step(prefill([4, 5, 6], 0))
    executor._cuda.synchronise()
    trt.gpu.view(executor._memory._cache_base, executor.kv_bytes)[:] = 255  # NaN in fp16
    np.testing.assert_array_equal(executor.step(prefill([4, 5, 6], 0)), first)


def test_too_little_memory_for_the_kv_cache_is_told_in_bytes(
    engine: Engine, trt: FakePagedTensorRT
) -> None:
    trt.gpu.size_bytes = 1000
    with pytest.raises(EngineError, match="40 blocks of 4 tokens, 1000 are left; give less"):
        TensorrtExecutor(engine, NUM_BLOCKS)
    assert trt.gpu.is_empty


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        ("deserialize", "can't be loaded: the plan is for another GPU"),
        ("context", "gives no execution context"),
    ],
)
def test_what_tensorrt_refuses_is_told(
    engine: Engine, trt: FakePagedTensorRT, broken: str, message: str
) -> None:
    trt.broken = broken
    with pytest.raises(EngineError, match=message):
        TensorrtExecutor(engine, NUM_BLOCKS)
    assert trt.gpu.is_empty


def test_stages_are_refused(engine: Engine) -> None:
    parallel = Parallel(tp=2, pp=2)
    with pytest.raises(EngineError, match="2 stages, which can't be served on GPUs"):
        check_servable(msgspec.structs.replace(engine.manifest, parallel=parallel))


def test_tensorrt_has_every_call() -> None:
    """Where it is installed, which it isn't where this was written."""
    real = pytest.importorskip("tensorrt")
    assert "strategy" in real.ICudaEngine.create_execution_context.__doc__
    assert hasattr(real.ExecutionContextAllocationStrategy, "USER_MANAGED")
    calls = [*methods(FakeRuntime), *methods(FakeEngine), *methods(FakeContext)]
    kinds = (real.Runtime, real.ICudaEngine, real.IExecutionContext)
    lacking = [name for name in calls if not any(hasattr(kind, name) for kind in kinds)]
    assert lacking == ["is_stream_capturable"]  # of TensorRT for RTX, and not called


def with_rows(batch: StepBatch, rows: list[int]) -> StepBatch:
    names = ("token_ids", "positions", "query_start", "kv_lengths", "block_tables")
    arrays = {name: getattr(batch, name) for name in names}
    return StepBatch(**arrays, logit_rows=np.array(rows, np.int32))
