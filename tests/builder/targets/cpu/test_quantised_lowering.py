"""Quantised linears lowered: their kernels, where activations become int8, and what they weigh."""

import re
from collections.abc import Callable
from typing import Any

import pytest

from llmbuild.builder.graph.pipeline import run_passes
from llmbuild.builder.graph.step_graph import StepGraph
from llmbuild.builder.models.config import DecoderConfig, NormConfig
from llmbuild.builder.targets.cpu.emit import emit
from llmbuild.builder.targets.cpu.lower import lower
from llmbuild.builder.targets.cpu.lowering import int8_row_bytes
from llmbuild.builder.targets.cpu.memory import plan_arena
from llmbuild.builder.targets.cpu.pack import packed_bytes, weight_offsets
from llmbuild.builder.targets.cpu.plan import (
    Call,
    Layout,
    OwnRows,
    PackedWeight,
    Rows,
    StepInput,
    StepPlan,
    View,
)
from llmbuild.quant.grid import WeightGrid
from llmbuild.quant.plan import QuantPlan
from llmbuild.runtime.manifest import KVLayout, Limits

WIDE = {"hidden_size": 64, "intermediate_size": 96, "num_heads": 4, "head_dim": 16}
WIDE |= {"num_layers": 1, "windows": (0,), "layer_ropes": (0,)}
INT4, INT8 = WeightGrid(4, 32, False), WeightGrid(8, 0, True)
LIMITS = Limits(max_sequence_length=32, max_step_tokens=23, max_sequences=7)
Grids = Callable[[str], WeightGrid | None]


def linears(grid: WeightGrid) -> Grids:
    return lambda name: grid if re.search("_proj.weight|lm_head", name) else None


@pytest.fixture
def plan_of(
    traced: Callable[..., StepGraph],
    decoder_config: Callable[..., DecoderConfig],
    kv_layout: Callable[..., KVLayout],
) -> Callable[..., StepPlan]:
    """plan_of(grids, activation_group, **config overrides)"""

    def build(grids: Grids, activation_group: int, **overrides: Any) -> StepPlan:
        step = traced(**(WIDE | overrides))
        weights = {name: grid for name in step.weights if (grid := grids(name)) is not None}
        run_passes(step, plan=QuantPlan(weights, dict.fromkeys(weights, activation_group)))
        config = decoder_config(**(WIDE | overrides))
        return lower(step, config, kv_layout(config))

    return build


def calls(plan: StepPlan, kernel: str) -> list[Call]:
    return [call for call in plan.calls if call.kernel == kernel]


def test_calls_of_a_known_model_with_int8_activations(
    plan_of: Callable[..., StepPlan],
) -> None:
    """hidden 64, inner 96, vocabulary 37, 4 heads in 2 groups of 16: Q 64, K and V 32."""
    plan, grid = plan_of(linears(INT4), 32), "Grid<4, 32, true>"
    assert [(call.kernel, call.template) for call in plan.calls] == [
        ("rope_table", (2,)),
        ("gather_rows", ("float", 64, 64)),
        ("rms_norm_int8", (64, 32, 64)),
        ("int8_linear", (grid, 128, 64, 32, 128)),
        ("rope_kv_write", ("float", "float", 4, 2, 16, 4, 128, 128, 128, 64, "false", 4)),
        ("paged_attention", ("float", "float", 4, 2, 16, 4, 64, 64, "false", "false")),
        ("gather_rows", ("float", 64, 64)),
        ("quantise_rows", (64, 32, 64)),
        ("int8_linear", (grid, 64, 64, 32, 64)),
        ("gather_rows", ("float", 64, 64)),
        ("add_rms_norm_int8", (64, 64, 64, 64, 32)),
        ("int8_linear", (grid, 192, 64, 32, 192)),
        ("gated_activation_int8", (96, 192, 192, 32, "Silu")),
        ("int8_linear", (grid, 64, 96, 32, 64)),
        ("add_rms_norm_int8", (64, 64, 64, 64, 32)),
        ("int8_linear", (grid, 37, 64, 32, 37)),
    ]


def test_calls_of_a_known_model_with_fp32_activations(
    plan_of: Callable[..., StepPlan],
) -> None:
    """A grid of whole rows has their width as its group."""
    plan = plan_of(linears(INT8), 0)
    assert [call.template for call in calls(plan, "dequantised_linear")] == [
        ("Grid<8, 64, false>", 128, 64, 64, 128),
        ("Grid<8, 64, false>", 64, 64, 64, 64),
        ("Grid<8, 64, false>", 192, 64, 64, 192),
        ("Grid<8, 96, false>", 64, 96, 96, 64),
        ("Grid<8, 64, false>", 37, 64, 64, 37),
    ]
    kernels = {call.kernel for call in plan.calls}
    assert {"rms_norm", "add_rms_norm", "gated_activation"} <= kernels
    assert not {kernel for kernel in kernels if "int8" in kernel or kernel == "quantise_rows"}


def test_int8_rows_are_buffers_of_their_bytes(plan_of: Callable[..., StepPlan]) -> None:
    plan = plan_of(linears(INT4), 32)
    widths = {"rms_norm_int8": 64, "add_rms_norm_int8": 64, "gated_activation_int8": 96}
    for kernel, width in widths.items():
        for call in calls(plan, kernel):
            rows = call.writes[-1]
            assert rows.dtype == "int8_rows"
            # Codes, then a scale and two sums for each 32 columns, up to whole 64 bytes.
            assert 4 * rows.width == -(-(width + 3 * 4 * (width // 32)) // 64) * 64
    for call in calls(plan, "int8_linear"):
        x, weight, bias, y, count = call.arguments
        assert (x.buffer.dtype, x.column) == ("int8_rows", 0)
        assert (weight.layout, weight.dtype, weight.grid) == (Layout.CODES, "int4", INT4)
        assert (bias, call.writes, count) == (None, (y.buffer,), y.buffer.count)


@pytest.mark.parametrize(("width", "group"), [(32, 32), (64, 32), (96, 96), (576, 64)])
def test_bytes_of_a_row_are_those_of_its_fields(width: int, group: int) -> None:
    fields = width + 4 * width // group + 4 * width // 32 + 4 * width // 32
    assert int8_row_bytes(width, group) - fields in range(64)
    assert int8_row_bytes(width, group) % 64 == 0


def test_a_value_that_others_read_too_stays_fp32_and_is_rounded_once(
    plan_of: Callable[..., StepPlan],
) -> None:
    """V alone is quantised otherwise, and Q and K not at all: one norm for both kinds of linear.
    gate and up are on two grids: one int8 result serves both."""

    def grids(name: str) -> WeightGrid | None:
        chosen = {"v_proj": INT4, "gate_proj": INT4, "up_proj": INT8, "down_proj": INT8}
        return chosen.get(name.split(".")[-2])

    plan = plan_of(grids, 32)
    assert not calls(plan, "rms_norm_int8")
    (norm,) = calls(plan, "rms_norm")
    quantise = next(c for c in calls(plan, "quantise_rows") if c.arguments[0] == norm.arguments[3])
    v, gate, up, _ = calls(plan, "int8_linear")
    assert v.arguments[0] == quantise.arguments[1]
    assert gate.arguments[0] == up.arguments[0]
    (fused, *_) = calls(plan, "add_rms_norm_int8")
    assert fused.writes[1] == gate.arguments[0].buffer
    assert len(calls(plan, "quantise_rows")) == 1
    assert len(calls(plan, "linear")) == 3  # Q and K, o, the head


def test_norms_that_have_no_int8_kernel_are_rounded_after(
    plan_of: Callable[..., StepPlan],
) -> None:
    plan = plan_of(linears(INT4), 32, norm=NormConfig(1e-5, "layer"))
    assert len(calls(plan, "quantise_rows")) == 4  # three norms, and attention's rows
    for call in calls(plan, "layer_norm"):
        (rounded,) = (
            c for c in plan.calls if c.kernel == "quantise_rows" and c.buffers >= {*call.writes}
        )
        assert rounded.template == (64, 32, 64)


def test_a_quantised_embedding_is_one_matrix_for_rows_and_head(
    plan_of: Callable[..., StepPlan],
) -> None:
    plan = plan_of(lambda name: INT4 if name == "embed.weight" else None, 32, tie_embeddings=True)
    matrix = PackedWeight("embed.weight", (37, 64), "int4", Layout.CODES, INT4)
    (gather,) = calls(plan, "gather_quantised_rows")
    assert gather.template == ("Grid<4, 32, true>", 64, 64)
    assert gather.arguments[:3] == (matrix, OwnRows(0, matrix.shape[0]), StepInput("token_ids"))
    (head,) = calls(plan, "int8_linear")
    assert head.arguments[1] == matrix
    assert [weight for weight in plan.weights if "embed" in weight.name] == [matrix]
    zero_points = WeightGrid(4, 32, False, zero_points=True)
    plan = plan_of(lambda name: zero_points if name == "embed.weight" else None, 0)
    (gather,) = calls(plan, "gather_quantised_rows")
    assert gather.template == ("Grid<4, 32, true, true>", 64, 64)
    assert head.writes == (plan.logits,)


@pytest.mark.parametrize("activation_group", [0, 32])
def test_every_buffer_is_written_once_before_it_is_read(
    plan_of: Callable[..., StepPlan], activation_group: int
) -> None:
    plan = plan_of(linears(INT8), activation_group, qk_norm="head", qkv_bias=True)
    written = set()
    for call in plan.calls:
        read = {buffer for buffer in call.buffers if buffer.rows is not Rows.LONGEST}
        assert read - set(call.writes) <= written
        assert not set(call.writes) & written
        written.update(call.writes)
    assert {w.name.rpartition(".")[2] for w in plan.weights if w.grid} == {"weight"}
    biases = [call.arguments[2] for call in plan.calls if "linear" in call.kernel]
    assert [bias is not None for bias in biases] == [True, False, False, False, False]


def test_buffers_that_are_alive_together_have_memory_of_their_own(
    plan_of: Callable[..., StepPlan],
) -> None:
    """For as many bytes as a kernel writes, int8 rows included."""
    plan = plan_of(linears(INT4), 32)
    arena = plan_arena(plan, LIMITS)
    last_use = {b: i for i, call in enumerate(plan.calls) for b in call.buffers}
    alive: dict[Any, int] = {}
    for index, call in enumerate(plan.calls):
        for buffer in call.writes:
            if buffer == plan.logits:
                continue
            begin, size = arena.offsets[buffer], 4 * buffer.width * LIMITS.max_step_tokens
            assert begin % 64 == 0
            assert begin + size <= arena.size_bytes
            for other, other_size in alive.items():
                start = arena.offsets[other]
                assert start + other_size <= begin or begin + size <= start
            alive[buffer] = size
        alive = {buffer: size for buffer, size in alive.items() if last_use[buffer] > index}


def test_emitted_calls_name_their_headers_types_and_offsets(
    plan_of: Callable[..., StepPlan],
) -> None:
    plan = plan_of(linears(INT4), 32)
    arena, offsets = plan_arena(plan, LIMITS), weight_offsets(plan)
    source = emit(plan, arena, LIMITS, "m")
    assert '#include "linear/quantised.h"' in source
    head = plan.calls[-1]
    x: View = head.arguments[0]
    begin = arena.offsets[x.buffer]
    assert (
        "  int8_linear<Grid<4, 32, true>, 37, 64, 32, 37>"
        f"(worker, buffer(uint8_t{{}}, {begin}, 0), weight(uint8_t{{}}, "
        f"{offsets['lm_head.weight']}), nullptr, run.logits, R);"
    ) in source


def test_packed_weights_take_their_bits_and_scales(plan_of: Callable[..., StepPlan]) -> None:
    plan = plan_of(linears(INT4), 32)
    (head,) = (weight for weight in plan.weights if weight.name == "lm_head.weight")
    # 37 rows in 3 tiles of 16; of each group of 32 codes of half a byte, a scale and a minimum.
    assert packed_bytes(head) == 48 * 2 * (16 + 2 + 2)


def test_linears_of_one_value_get_rows_of_their_own_groups(
    traced: Callable[..., StepGraph],
    decoder_config: Callable[..., DecoderConfig],
    kv_layout: Callable[..., KVLayout],
) -> None:
    step = traced(**WIDE)
    grids = {name: INT8 for name in step.weights if "_proj.weight" in name}
    groups = {name: 64 if "q_proj" in name else 32 for name in grids}
    run_passes(step, plan=QuantPlan(grids, groups))
    plan = lower(step, decoder_config(**WIDE), kv_layout(decoder_config(**WIDE)))
    for call in calls(plan, "int8_linear"):
        (rows,) = (
            v.buffer for v in call.arguments if isinstance(v, View) and "int8" in v.buffer.name
        )
        columns, group = call.template[2], call.template[3]
        assert rows.width * 4 == int8_row_bytes(int(columns), int(group))
    attention_input = [c.template[3] for c in calls(plan, "int8_linear")][:2]
    assert sorted(attention_input) == [32, 64]
