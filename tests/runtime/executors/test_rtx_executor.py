"""Engines of TensorRT for RTX on a GPU that isn't there: the executor's own code runs, against
fakes that hold it to the rules of CUDA and TensorRT and compute with the emulated network. Nothing
here has run on a GPU."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from fake_tensorrt import FakeTensorRT
from plan_harness import NUM_BLOCKS, Compiled, decode, prefill, reference_tokens

from llmbuild import LLM, SamplingParams
from llmbuild.runtime.batch import StepBatch
from llmbuild.runtime.engine import Engine, open_engine
from llmbuild.runtime.executors import decode_graphs
from llmbuild.runtime.executors.greedy import likeliest
from llmbuild.runtime.executors.rtx import RtxExecutor
from llmbuild.runtime.replay import STEPS_FILE, load_steps, relative_difference, replay

PROMPTS = [[7, 200, 31], [5], list(range(40, 77)), [9] * 26, [1, 2, 3, 4, 5]]


# Whole engines


@pytest.mark.parametrize("num_blocks", [2, 3, NUM_BLOCKS])
def test_an_llm_gives_the_references_tokens(
    compiled: Compiled, trt: FakeTensorRT, num_blocks: int
) -> None:
    """Prompts in chunks, with fewer slots than requests."""
    params = SamplingParams(max_tokens=9, ignore_eos=True)
    with LLM(compiled.root, num_blocks=num_blocks) as llm:
        done = llm.generate(PROMPTS, params)
        assert trt.gpu.calls["cudaGraphLaunch"] > 0
        llm.check()
    for prompt, completion in zip(PROMPTS, done, strict=True):
        assert completion.error is None
        assert list(completion.token_ids) == reference_tokens(compiled, prompt, 9)
    assert trt.gpu.is_empty


def test_sampled_requests_share_the_steps(compiled: Compiled, trt: FakeTensorRT) -> None:
    greedy = SamplingParams(max_tokens=6, ignore_eos=True)
    sampled = SamplingParams(max_tokens=6, ignore_eos=True, temperature=1.0, seed=3)
    with LLM(compiled.root) as llm:
        assert llm.num_blocks == 8 + 1
        assert llm.kv_bytes == 8 * llm.manifest.kv.block_bytes
        assert llm.kv_bytes in map(len, trt.gpu.device.values())
        first, again, alone = (
            [each.token_ids for each in llm.generate(PROMPTS[:2], params)]
            for params in ([greedy, sampled], [greedy, sampled], [greedy, greedy])
        )
    assert first == again
    assert first[0] == alone[0]
    assert first[1] != alone[1]


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_verify_replays_its_steps(
    compile_as: Callable[[str], Compiled],
    compiled: Compiled,
    fakes: Callable[[Compiled], FakeTensorRT],
    precision: str,
) -> None:
    used = compiled if precision == "fp16" else compile_as(precision)
    fakes(used)
    engine = open_engine(used.root)
    assert {layer.k_dtypes[0] for layer in engine.manifest.kv.layers} == {precision}
    steps = load_steps(engine.root / STEPS_FILE)
    for got, want in zip(replay(engine, steps), steps.logits, strict=True):
        assert relative_difference(got[:, steps.columns], want) <= steps.tolerance


# Steps


def test_several_greedy_steps_are_those_of_one_each(
    executor: RtxExecutor, compiled: Compiled
) -> None:
    prompts = {0: [3, 5, 8], 4: [100, 2], 5: [77]}
    first = {slot: executor.step_greedy(prefill(p, slot))[0][0] for slot, p in prompts.items()}
    batch = decode({slot: (len(prompts[slot]), token) for slot, token in first.items()})
    rows = executor.step_greedy(batch, 4)
    for (slot, prompt), row in zip(prompts.items(), rows, strict=True):
        assert [first[slot], *row] == reference_tokens(compiled, prompt, 5)


def test_padding_has_logits_of_zero(executor: RtxExecutor) -> None:
    batch = decode({2: (0, 7), -1: (0, 0)})
    logits = executor.step(batch)
    assert logits.dtype == np.float32
    assert logits.shape == (2, 257)
    assert np.abs(logits[0]).max() > 0
    assert not logits[1].any()
    assert executor.step_greedy(batch)[1] == [0]


def test_a_step_without_logits(executor: RtxExecutor) -> None:
    batch = prefill([4, 5, 6], 0)
    arrays = {name: getattr(batch, name) for name in ("token_ids", "positions", "query_start")}
    quiet = StepBatch(
        **arrays,
        kv_lengths=batch.kv_lengths,
        block_tables=batch.block_tables,
        logit_rows=np.zeros(0, np.int32),
    )
    assert executor.step(quiet).shape == (0, 257)
    assert executor.step_greedy(quiet) == []


def test_the_likeliest_token_is_the_lowest_of_a_tie_and_is_marked_where_it_is_no_number() -> None:
    inf, nan = np.inf, np.nan
    rows = [[1, 3, 3], [0, nan, 2], [0, 1, inf], [-inf, -inf, -inf], [-inf, 2, 1], [-3, -1, -2]]
    assert likeliest(np.array(rows, np.float32)).tolist() == [1, ~1, ~2, ~0, 1, 1]


def test_a_token_that_went_wrong_is_not_fed_back(
    executor: RtxExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    fed = []
    place = executor._memory.place

    def wrong(placed: Any) -> Any:
        return np.full((placed.num_rows, 257), np.nan, np.float32)

    def placing(execution: Any) -> Any:
        fed.append(execution.inputs["token_ids"].ravel().tolist())
        return place(execution)

    monkeypatch.setattr(executor._memory, "logits", wrong)
    monkeypatch.setattr(executor._memory, "place", placing)
    assert executor.step_greedy(decode({0: (0, 7)}), 2) == [[~0, ~0]]
    assert fed == [[7], [0]]


# Graphs


def test_an_execution_is_recorded_at_its_second_time_and_launched_after(
    executor: RtxExecutor, trt: FakeTensorRT
) -> None:
    counts, gpu = executor.graph_counts, trt.gpu
    for position in range(5):
        executor.step_greedy(decode({0: (position, 7)}))
        assert counts.recorded == (position >= 1)
        assert counts.launched == gpu.calls["cudaGraphLaunch"] == max(0, position - 1)
    assert counts.hit_rate == 3 / 5
    allocations = gpu.calls["cudaMalloc"]
    executor.step_greedy(decode({0: (5, 7), 1: (0, 7)}), 3)  # a bucket of 2
    executor.step_greedy(decode({1: (3, 7), 2: (0, 7)}), 3)  # from another slot
    assert counts.recorded == 3
    assert counts.launched == 5
    assert gpu.calls["cudaMalloc"] == allocations


def test_a_graph_reads_what_each_launch_brings(executor: RtxExecutor, compiled: Compiled) -> None:
    """And sequences that take turns in a slot have the addresses of its graph."""
    for prompt in ([11], [22], [33]):
        first = executor.step_greedy(prefill([*prompt, 9], 3))[0]
        rows = executor.step_greedy(decode({3: (2, first[0])}), 6)
        assert [*first, *rows[0]] == reference_tokens(compiled, [*prompt, 9], 7)
    assert executor.graph_counts.launched == 3 * 6 - 2


def test_graphs_are_bounded(executor: RtxExecutor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode_graphs, "MAX_GRAPHS", 2)
    for slot in range(5):
        executor.step_greedy(decode({slot: (0, 7)}), 4)
    counts = executor.graph_counts
    assert (counts.recorded, counts.launched, counts.without) == (2, 4, 16)


def test_a_plan_that_can_not_be_recorded_runs_without_graphs(
    executor: RtxExecutor, trt: FakeTensorRT, compiled: Compiled
) -> None:
    trt.is_capturable = False
    assert executor.step_greedy(decode({0: (0, 7)}), 8) == [reference_tokens(compiled, [7], 8)]
    counts = executor.graph_counts
    assert not counts.is_possible
    assert (counts.recorded, counts.launched, counts.without) == (0, 0, 8)
    assert len(trt.contexts) == 3  # one more than of the profiles, tried once


# What is kept


def test_compiled_kernels_are_kept_for_the_next_time(engine: Engine, trt: FakeTensorRT) -> None:
    for expected in (b"", b"[(1, 1), (1, 3)]"):
        executor = RtxExecutor(engine, NUM_BLOCKS)
        assert trt.loaded_cache == expected
        executor.step_greedy(decode({0: (0, 7)}))
        executor.step_greedy(prefill([1, 2, 3], 0))
        executor.close()
