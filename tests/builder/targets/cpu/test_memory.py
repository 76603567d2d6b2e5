"""The arena's plan: nothing that is alive at once overlaps, and little is left unused."""

from collections.abc import Callable
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmbuild.builder.graph.step_graph import StepGraph
from llmbuild.builder.models.config import DecoderConfig
from llmbuild.builder.targets.cpu.lower import lower
from llmbuild.builder.targets.cpu.memory import plan_arena, size_bytes
from llmbuild.builder.targets.cpu.plan import Buffer, Call, Rows, StepPlan, View
from llmbuild.runtime.manifest import KVLayout, Limits

LIMITS = Limits(max_sequence_length=9, max_step_tokens=7, max_sequences=3)
LOGITS = Buffer("logits", Rows.LOGIT_ROWS, 11)

# (first call, last call, width) of each buffer.
Lifetimes = list[tuple[int, int, int]]
LIFETIMES = st.lists(
    st.tuples(st.integers(0, 12), st.integers(0, 12), st.integers(1, 400)).map(
        lambda each: (min(each[:2]), max(each[:2]), each[2])
    ),
    max_size=24,
)
NO_KV = KVLayout(block_size=4, num_kv_heads=1, head_dim=2, layers=[])


def plan_with(lifetimes: Lifetimes) -> StepPlan:
    """Calls 0 to 12; each buffer is written by its first and read by its last."""
    buffers = [
        Buffer(str(index), list(Rows)[index % 3], width)
        for index, (_, _, width) in enumerate(lifetimes)
    ]
    calls = []
    for index in range(13):
        ends = [b for b, (_, last, _) in zip(buffers, lifetimes, strict=True) if last == index]
        starts = [b for b, (first, _, _) in zip(buffers, lifetimes, strict=True) if first == index]
        views = tuple(View(buffer, 0, buffer.width) for buffer in ends)
        calls.append(Call("kernel", (), views, (*starts, LOGITS)))
    return StepPlan(tuple(calls), (), LOGITS, NO_KV, hidden_size=1)


def live_bytes(plan: StepPlan, limits: Limits) -> list[int]:
    """Bytes alive at each call, counted call by call."""
    touched: dict[Buffer, list[int]] = {}
    for index, call in enumerate(plan.calls):
        for buffer in call.buffers - {plan.logits}:
            touched.setdefault(buffer, []).append(index)
    return [
        sum(size_bytes(b, limits) for b, at in touched.items() if min(at) <= index <= max(at))
        for index in range(len(plan.calls))
    ]


@given(LIFETIMES)
def test_buffers_that_live_at_the_same_time_never_overlap(lifetimes: Lifetimes) -> None:
    plan = plan_with(lifetimes)
    arena = plan_arena(plan, LIMITS)
    assert {int(buffer.name) for buffer in arena.offsets} == set(range(len(lifetimes)))
    for one, other in combinations(arena.offsets, 2):
        (first, last, _), (begin, end, _) = lifetimes[int(one.name)], lifetimes[int(other.name)]
        if first <= end and begin <= last:
            a, b = arena.offsets[one], arena.offsets[other]
            assert a + size_bytes(one, LIMITS) <= b or b + size_bytes(other, LIMITS) <= a
    for buffer, offset in arena.offsets.items():
        assert offset >= 0
        assert offset % 64 == 0
        assert offset + size_bytes(buffer, LIMITS) <= arena.size_bytes


@given(LIFETIMES)
def test_size_lies_between_what_is_alive_at_once_and_all_together(lifetimes: Lifetimes) -> None:
    plan = plan_with(lifetimes)
    arena = plan_arena(plan, LIMITS)
    together = sum(size_bytes(buffer, LIMITS) for buffer in arena.offsets)
    assert max(live_bytes(plan, LIMITS)) <= arena.size_bytes <= together


@pytest.mark.parametrize("dtype", ["fp32", "int32"])
@pytest.mark.parametrize("rows", [Rows.TOKENS, Rows.LOGIT_ROWS])
@pytest.mark.parametrize(("width", "expected"), [(1, 64), (2, 64), (3, 128), (16, 448)])
def test_buffer_has_room_for_the_largest_step_in_whole_cache_lines(
    rows: Rows, width: int, expected: int, dtype: str
) -> None:
    assert size_bytes(Buffer("x", rows, width, dtype=dtype), LIMITS) == expected  # 7 rows


@pytest.mark.parametrize(("width", "expected"), [(1, 128), (3, 256), (16, 3 * 448)])
def test_rows_for_each_expert_of_a_token_are_counted(width: int, expected: int) -> None:
    assert size_bytes(Buffer("x", Rows.TOKENS, width, rows_each=3), LIMITS) == expected


@pytest.mark.parametrize(("width", "expected"), [(1, 64), (16, 64), (17, 128)])
def test_buffer_of_one_row_has_one_whatever_the_step(width: int, expected: int) -> None:
    assert size_bytes(Buffer("x", Rows.ONE, width), LIMITS) == expected


def test_logits_are_the_callers_and_take_no_room() -> None:
    arena = plan_arena(plan_with([]), LIMITS)
    assert (arena.offsets, arena.size_bytes) == ({}, 0)


def test_a_buffers_place_is_used_again_after_its_last_reader() -> None:
    arena = plan_arena(plan_with([(0, 3, 16), (4, 8, 16), (9, 12, 16)]), LIMITS)
    assert set(arena.offsets.values()) == {0}
    kept = plan_arena(plan_with([(0, 3, 16), (3, 8, 16)]), LIMITS)  # call 3 reads one, writes one
    assert sorted(kept.offsets.values()) == [0, 448]


MODELS = {
    "SmolLM2 135M": {
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_heads": 9,
        "num_kv_heads": 3,
        "head_dim": 64,
        "tie_embeddings": True,
    },
    "Llama 3.1 8B": {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_heads": 32,
        "num_kv_heads": 8,
        "head_dim": 128,
    },
}


@pytest.mark.parametrize("sizes", MODELS.values(), ids=MODELS.keys())
def test_a_decoders_arena_is_within_a_fifth_of_what_is_alive_at_once(
    lowerable: Callable[..., StepGraph],
    decoder_config: Callable[..., DecoderConfig],
    kv_layout: Callable[..., KVLayout],
    sizes: dict[str, int],
) -> None:
    config = decoder_config(**sizes)
    plan = lower(lowerable(**sizes), config, kv_layout(config))
    limits = Limits(max_sequence_length=64, max_step_tokens=48, max_sequences=8)
    arena = plan_arena(plan, limits)
    assert arena.size_bytes <= 1.2 * max(live_bytes(plan, limits))
