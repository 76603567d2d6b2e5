"""The build's check of itself: its steps cover what they should, and no fault gets through."""

from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmbuild.builder import verify
from llmbuild.builder.targets.cpu import build as cpu_build
from llmbuild.builder.targets.cpu import toolchain
from llmbuild.builder.targets.cpu.emit import emit
from llmbuild.builder.targets.cpu.memory import ArenaPlan, plan_arena
from llmbuild.builder.targets.cpu.plan import Call, Pool, StepPlan
from llmbuild.builder.verify import MAX_STORED_COLUMNS, make_batches, stored_steps
from llmbuild.errors import InternalError, RecipeError
from llmbuild.runtime.batch import StepBatch
from llmbuild.runtime.manifest import SCRATCH_BLOCK, KVLayer, KVLayout, Limits

VOCAB_SIZE = 13


def layout(block_size: int) -> KVLayout:
    layer = KVLayer.of_heads([("fp32", "fp32")])
    return KVLayout(block_size=block_size, num_kv_heads=1, head_dim=2, layers=[layer])


def limits_of(sequence_length: int, step_tokens: int, sequences: int) -> Limits:
    return Limits(
        max_sequence_length=sequence_length,
        max_step_tokens=step_tokens,
        max_sequences=sequences,
    )


@st.composite
def builds(draw: st.DrawFn) -> tuple[Limits, int, tuple[int, ...]]:
    """(limits, block size, buckets) that a recipe may ask for."""
    length = draw(st.integers(1, 70))
    step_tokens = draw(st.integers(1, 80))
    sequences = draw(st.integers(1, min(step_tokens, 64)))
    buckets = draw(st.sets(st.integers(1, sequences), min_size=1, max_size=5))
    block_size = draw(st.integers(1, min(length, 20)))
    return limits_of(length, step_tokens, sequences), block_size, tuple(sorted(buckets))


def tokens_of(batch: StepBatch) -> Iterable[tuple[int, int, int]]:
    """(sequence of the batch, row, position) of each token."""
    for sequence in range(batch.num_sequences):
        for row in range(batch.query_start[sequence], batch.query_start[sequence + 1]):
            yield sequence, row, int(batch.positions[row])


def check(limits: Limits, block_size: int, buckets: tuple[int, ...]) -> list[StepBatch]:
    """Every property that the reference and the engine count on."""
    batches, num_blocks = make_batches(limits, layout(block_size), VOCAB_SIZE, buckets)
    written: dict[tuple[int, int], tuple[int, int]] = {}  # slot -> (first block, position)
    for batch in batches:
        assert batch.num_tokens <= limits.max_step_tokens
        assert batch.num_sequences <= limits.max_sequences
        assert batch.query_start[0] == 0
        assert batch.query_start[-1] == batch.num_tokens == len(batch.positions)
        assert (np.diff(batch.query_start) >= 1).all()
        assert (batch.kv_lengths <= limits.max_sequence_length).all()
        assert ((batch.token_ids >= 0) & (batch.token_ids < VOCAB_SIZE)).all()
        assert ((batch.block_tables >= 0) & (batch.block_tables < num_blocks)).all()
        assert batch.logit_rows.tolist() == (batch.query_start[1:] - 1).tolist()
        for array in (batch.token_ids, batch.positions, batch.query_start, batch.kv_lengths):
            assert array.dtype == np.int32
        for sequence, row, position in tokens_of(batch):
            last_row = batch.query_start[sequence + 1] - 1
            assert position == batch.kv_lengths[sequence] - 1 - (last_row - row)
            table = batch.block_tables[sequence]
            slot = int(table[position // block_size]), position % block_size
            if slot[0] == SCRATCH_BLOCK:  # padding: always the same token at the same place
                assert (position, batch.token_ids[row]) == (0, 0)
                assert not table.any()
                continue
            assert slot not in written
            written[slot] = int(table[0]), position
            for earlier in range(position):  # all of the sequence's past is there
                slot = int(table[earlier // block_size]), earlier % block_size
                assert written[slot] == (int(table[0]), earlier)
    decode_sizes = {batch.num_sequences for batch in batches if batch.is_decode}
    assert set(buckets) <= decode_sizes
    most = min(limits.max_step_tokens, limits.max_sequences * limits.max_sequence_length)
    assert batches[-1].num_tokens == most
    return batches


@given(builds())
def test_steps_keep_to_every_limit_and_cover_every_bucket(
    build: tuple[Limits, int, tuple[int, ...]],
) -> None:
    check(*build)


@pytest.mark.parametrize("buckets", [(1,), (1, 64), (1, 3, 5)])
@pytest.mark.parametrize("length", [1, 2, 4, 5, 2048])
@pytest.mark.parametrize("block_size", [1, 4])
def test_limits_at_their_edges_are_covered_too(
    length: int, block_size: int, buckets: tuple[int, ...]
) -> None:
    for step_tokens in {max(buckets), max(buckets) + 1, 512}:
        check(limits_of(length, step_tokens, max(buckets)), min(block_size, length), buckets)


def test_step_of_one_sequence_is_filled_however_long_it_must_be() -> None:
    batches = check(limits_of(2048, 700, 1), 16, (1,))
    assert batches[-1].num_tokens == 700


def test_ordinary_limits_give_prompts_around_a_block_chunks_mixed_steps_and_padding() -> None:
    batches = check(limits_of(2048, 512, 32), 16, (1, 2, 4, 8))
    starts = [b for b in batches if b.num_sequences == 1 and b.positions[0] == 0]
    lengths = {batch.num_tokens for batch in starts}
    assert {1, 15, 17} <= lengths  # and more than a block in chunks:
    assert any(b.num_tokens > 1 and b.positions[0] > 0 for b in batches)
    mixed = [b for b in batches if b.num_sequences == 2 and not b.is_decode]
    assert any({1} < set(np.diff(b.query_start)) for b in mixed)
    padded = [b for b in batches if b.is_decode and not b.block_tables[-1].any()]
    assert [b.num_sequences for b in padded] == [8]
    assert max(int(b.kv_lengths.max()) for b in batches) > 3 * 16 - 2
    assert max(b.num_sequences for b in batches) == 8


def test_stored_logits_are_those_of_the_stored_columns() -> None:
    batches, num_blocks = make_batches(limits_of(5, 4, 1), layout(4), VOCAB_SIZE, (1,))
    for vocab_size in (1, 13, MAX_STORED_COLUMNS - 1, MAX_STORED_COLUMNS, 3 * MAX_STORED_COLUMNS):
        shape = (1, vocab_size)
        logits = [np.arange(vocab_size, dtype=np.float32).reshape(shape) for _ in batches]
        steps = stored_steps(batches, logits, num_blocks, 0.5)
        assert len(steps.columns) == min(vocab_size, MAX_STORED_COLUMNS)
        assert steps.columns.tolist() == sorted(set(steps.columns.tolist()))
        assert (steps.columns[0], steps.columns[-1]) == (0, vocab_size - 1)
        assert all(rows[0].tolist() == steps.columns.tolist() for rows in steps.logits)


Emit = Callable[[StepPlan, ArenaPlan, Limits, str], str]


def altered(kernel: str, change: Callable[[Any], Any], chosen: Callable[[Any], bool]) -> Emit:
    """emit, with the chosen arguments of every call of a kernel changed."""

    def alter(call: Call) -> Call:
        if call.kernel != kernel:
            return call
        assert any(map(chosen, call.arguments))
        arguments = tuple(change(a) if chosen(a) else a for a in call.arguments)
        return replace(call, arguments=arguments)

    def faulty(plan: StepPlan, arena: ArenaPlan, limits: Limits, name: str) -> str:
        return emit(replace(plan, calls=tuple(map(alter, plan.calls))), arena, limits, name)

    return faulty


def is_a(kind: type) -> Callable[[Any], bool]:
    return lambda argument: type(argument) is kind


FAULTS: dict[str, Emit] = {
    "attention's scale": altered("paged_attention", lambda scale: 1.01 * scale, is_a(float)),
    "no window": altered("paged_attention", lambda window: 0, is_a(int)),
    "another layer's pool": altered("paged_attention", lambda p: Pool(0, 0, p.kind), is_a(Pool)),
    "another eps": altered("add_rms_norm", lambda eps: 1e-3, is_a(float)),
}


@pytest.fixture
def tiny(hf_model: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> Any:
    """A model with a window; what is compiled of it isn't optimised, as that takes longer."""
    flags = [flag.replace("-O3", "-O0") for flag in toolchain._FLAGS]
    monkeypatch.setattr(toolchain, "_FLAGS", flags)
    return hf_model(
        "mistral",
        sliding_window=3,
        vocab_size=31,
        hidden_size=24,
        intermediate_size=17,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        rms_norm_eps=1e-5,
    )


def halved(plan: StepPlan, limits: Limits) -> ArenaPlan:
    """Every buffer begins, aligned, at half of where it should."""
    arena = plan_arena(plan, limits)
    offsets = {buffer: offset // 128 * 64 for buffer, offset in arena.offsets.items()}
    return replace(arena, offsets=offsets)


def for_smaller_steps(plan: StepPlan, limits: Limits) -> ArenaPlan:
    """Buffers have room for half of a step's tokens; the arena is as large as it should be."""
    half = limits_of(limits.max_sequence_length, limits.max_step_tokens // 2, 1)
    return replace(plan_arena(plan, half), size_bytes=plan_arena(plan, limits).size_bytes)


def published(folder: Path) -> list[str]:
    """Everything that a build left beside its input."""
    return [path.name for path in folder.iterdir() if "engine" in path.name]


@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS.keys())
def test_wrong_code_fails_the_build_and_nothing_is_published(
    tiny: Any,
    compile_engine: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    fault: Emit,
) -> None:
    monkeypatch.setattr(cpu_build, "emit", fault)
    with pytest.raises(InternalError, match=r"logits differ from the reference's by .* of the"):
        compile_engine(tiny)
    assert published(tmp_path) == []


@pytest.mark.parametrize("plan", [halved, for_smaller_steps])
def test_buffers_that_overlap_in_the_largest_step_fail_the_build(
    tiny: Any,
    compile_engine: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    plan: Callable[[StepPlan, Limits], ArenaPlan],
) -> None:
    monkeypatch.setattr(cpu_build, "plan_arena", plan)
    with pytest.raises(InternalError, match=r"logits differ from the reference's by .* of the"):
        compile_engine(tiny)
    assert published(tmp_path) == []


def test_code_that_crashes_fails_the_build_and_nothing_is_published(
    tiny: Any,
    compile_engine: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    def crashing(*arguments: Any) -> str:
        source = emit(*arguments)
        begin = "PartsRun run{"  # of llmbuild_step
        assert source.count(begin) == 1
        return source.replace(begin, f"std::abort();\n  {begin}")

    monkeypatch.setattr(cpu_build, "emit", crashing)
    with pytest.raises(InternalError, match="ended with status -6 on its verification steps"):
        compile_engine(tiny)
    assert published(tmp_path) == []


@pytest.mark.parametrize("worst", [0.02, pytest.param(float("nan"), marks=pytest.mark.slow)])
def test_what_rounding_does_not_explain_is_our_fault(
    tiny: Any,
    compile_engine: Callable[..., Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    worst: float,
) -> None:
    """Whether the recipe gives a tolerance or not."""
    monkeypatch.setattr(verify, "relative_difference", lambda got, expected: worst)
    for overrides in ((), ("verify.tolerance=0.01",)):
        with pytest.raises(InternalError, match=r"logits differ .*; nothing was published"):
            compile_engine(tiny, *overrides)
    assert published(tmp_path) == []


def test_sound_code_passes_and_a_tolerance_below_rounding_fails(
    tiny: Any, compile_engine: Callable[..., Path], tmp_path: Path
) -> None:
    with pytest.raises(RecipeError, match=r"given 1e-12; .* or leave it out for 0\.0001"):
        compile_engine(tiny, "verify.tolerance=1e-12")
    assert published(tmp_path) == []
    assert (compile_engine(tiny) / "manifest.json").is_file()
