"""Lowering of a mixture of experts: its calls in order, and the buffers between them."""

from collections.abc import Callable
from typing import Any

import pytest

from llmbuild.builder.graph.step_graph import StepGraph
from llmbuild.builder.models.config import DecoderConfig, MoeConfig
from llmbuild.builder.targets.cpu.emit import emit
from llmbuild.builder.targets.cpu.lower import lower
from llmbuild.builder.targets.cpu.memory import plan_arena, size_bytes
from llmbuild.builder.targets.cpu.plan import Buffer, Call, Count, Layout, Rows, StepPlan, View
from llmbuild.runtime.manifest import KVLayout, Limits

EXPERTS, TOP_K, SIZE, HIDDEN = 7, 3, 9, 20
MOE = MoeConfig(EXPERTS, TOP_K, SIZE)
SHARED = MoeConfig(EXPERTS, TOP_K, SIZE, normalise=True, shared_size=11, shared_gate=True)
LIMITS = Limits(max_sequence_length=64, max_step_tokens=13, max_sequences=2)


@pytest.fixture
def plan_of(
    lowerable: Callable[..., StepGraph],
    decoder_config: Callable[..., DecoderConfig],
    kv_layout: Callable[..., KVLayout],
) -> Callable[..., StepPlan]:
    """plan_of(moe, precision="fp32"): the second of two layers is dense."""

    def build(moe: MoeConfig, precision: str = "fp32") -> StepPlan:
        overrides: dict[str, Any] = {"moe": moe, "moe_layers": (True, False)}
        config = decoder_config(**overrides)
        return lower(lowerable(precision, **overrides), config, kv_layout(config))

    return build


def mixture(plan: StepPlan) -> list[Call]:
    """The calls from the first layer's router to the norm of the second."""
    kernels = [call.kernel for call in plan.calls]
    begin = kernels.index("moe_route") - 1
    return list(plan.calls[begin : kernels.index("add_rms_norm", begin)])


def buffer(argument: object) -> Buffer:
    assert isinstance(argument, View)
    return argument.buffer


def test_calls_are_in_order_with_their_templates(plan_of: Callable[..., StepPlan]) -> None:
    assert [(call.kernel, call.template) for call in mixture(plan_of(MOE, "bf16"))] == [
        ("linear", ("bf16", 7, 20, 20, 7)),
        ("moe_route", (7, 3, "Softmax", "false", 7)),
        ("moe_sort", (7, 3)),
        ("moe_gather", (20, 20)),
        ("moe_linear", ("bf16", 7, 18, 20)),
        ("gated_activation", (9, 18, 18, 9, "Silu")),
        ("moe_linear", ("bf16", 7, 20, 9)),
        ("moe_combine", (20, 3, 20)),
    ]


def test_shared_mlp_reads_the_same_merged_linear_as_the_router(
    plan_of: Callable[..., StepPlan],
) -> None:
    calls = mixture(plan_of(SHARED))
    width = EXPERTS + 2 * 11 + 1  # router, gate and up, the shared MLP's own gate
    assert calls[0].template == ("float", width, HIDDEN, HIDDEN, width)
    assert calls[1].template == (7, 3, "Softmax", "true", width)
    assert [call.kernel for call in calls[8:]] == ["gated_activation", "linear", "elementwise"]
    gate, up = calls[8].arguments[:2]
    assert isinstance(gate, View)
    assert isinstance(up, View)
    assert gate.buffer == up.buffer == calls[0].writes[0]
    assert [(v.column, v.width) for v in (gate, up)] == [(7, 11), (18, 11)]


def test_shared_mlps_gate_is_broadcast_over_the_row(plan_of: Callable[..., StepPlan]) -> None:
    plan = plan_of(SHARED)
    source = emit(plan, plan_arena(plan, LIMITS), LIMITS, "m")
    merged = mixture(plan)[0].writes[0]
    (line,) = [line for line in source.splitlines() if "Sigmoid::apply" in line]
    column = f"{plan_arena(plan, LIMITS).offsets[merged]}, {merged.width - 1}"
    assert f"Sigmoid::apply(splat_row<{merged.width}>(buffer(float{{}}, {column}), r))" in line


def test_scoring_over_the_chosen_experts_reaches_the_template(
    plan_of: Callable[..., StepPlan],
) -> None:
    moe = MoeConfig(EXPERTS, TOP_K, SIZE, scoring="top_k_softmax")
    assert mixture(plan_of(moe))[1].template == (7, 3, "TopKSoftmax", "false", 7)


def test_buffers_between_the_calls_have_a_row_for_each_token_and_expert(
    plan_of: Callable[..., StepPlan],
) -> None:
    _, route, sort, gather, gate_up, activate, down, combine = mixture(plan_of(MOE))
    experts, weights = route.writes
    starts, rows_of, slot_of = sort.writes
    each = {"rows": Rows.TOKENS, "rows_each": TOP_K}

    def facts(buffer: Buffer) -> dict[str, object]:
        names = ("rows", "rows_each", "width", "dtype")
        return {name: getattr(buffer, name) for name in names}

    tokens = {"rows": Rows.TOKENS, "rows_each": 1}
    assert facts(experts) == tokens | {"width": TOP_K, "dtype": "int32"}
    assert facts(weights) == tokens | {"width": TOP_K, "dtype": "fp32"}
    assert facts(starts) == {
        "rows": Rows.ONE,
        "rows_each": 1,
        "width": EXPERTS + 1,
        "dtype": "int32",
    }
    assert facts(rows_of) == each | {"width": 1, "dtype": "int32"}
    assert facts(slot_of) == tokens | {"width": TOP_K, "dtype": "int32"}
    widths = [HIDDEN, 2 * SIZE, SIZE, HIDDEN]
    for call, width in zip((gather, gate_up, activate, down), widths, strict=True):
        assert facts(call.writes[0]) == each | {"width": width, "dtype": "fp32"}
    assert facts(combine.writes[0]) == tokens | {"width": HIDDEN, "dtype": "fp32"}


def test_each_call_reads_what_the_one_before_it_wrote(plan_of: Callable[..., StepPlan]) -> None:
    router, route, sort, gather, gate_up, activate, down, combine = mixture(plan_of(MOE))
    experts, weights = route.writes
    starts, rows_of, slot_of = sort.writes
    slots, tokens = Count(Rows.TOKENS, TOP_K), Count(Rows.TOKENS)
    assert buffer(route.arguments[0]) == router.writes[0]
    assert buffer(sort.arguments[0]) == experts
    assert (route.arguments[-1], sort.arguments[-1]) == (tokens, tokens)
    assert buffer(gather.arguments[0]) == buffer(router.arguments[0])
    assert buffer(gather.arguments[1]) == rows_of
    assert (gather.arguments[-1], activate.arguments[-1]) == (slots, slots)
    for call, source in ((gate_up, gather), (down, activate)):
        assert buffer(call.arguments[0]) == source.writes[0]
        assert buffer(call.arguments[2]) == starts
    gate, up = activate.arguments[:2]
    assert isinstance(gate, View)
    assert isinstance(up, View)
    assert gate.buffer == up.buffer == gate_up.writes[0]
    assert [(v.column, v.width) for v in (gate, up)] == [(0, SIZE), (SIZE, SIZE)]
    assert [buffer(argument) for argument in combine.arguments[:3]] == [
        down.writes[0],
        slot_of,
        weights,
    ]
    assert combine.arguments[-1] == tokens


def test_stacks_lie_in_tiles_and_are_named_for_their_layer(
    plan_of: Callable[..., StepPlan],
) -> None:
    plan = plan_of(MOE, "bf16")
    stacks = [weight for weight in plan.weights if len(weight.shape) == 3]
    assert [(w.name, w.shape, w.dtype, w.layout) for w in stacks] == [
        ("layers.0.mlp.experts.gate_up", (7, 18, 20), "bf16", Layout.TILES_OF_16),
        ("layers.0.mlp.experts.down", (7, 20, 9), "bf16", Layout.TILES_OF_16),
    ]


def test_arena_holds_the_slots_of_the_largest_step(plan_of: Callable[..., StepPlan]) -> None:
    plan = plan_of(MOE)
    gathered = mixture(plan)[3].writes[0]
    assert size_bytes(gathered, LIMITS) == -(-4 * 13 * TOP_K * HIDDEN // 64) * 64
    arena = plan_arena(plan, LIMITS)
    gate_up, activated = (mixture(plan)[index].writes[0] for index in (4, 5))
    ends = {b: arena.offsets[b] + size_bytes(b, LIMITS) for b in (gathered, gate_up, activated)}
    for one, other in ((gathered, gate_up), (gate_up, activated)):
        assert ends[one] <= arena.offsets[other] or ends[other] <= arena.offsets[one]
