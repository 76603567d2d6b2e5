"""Linears with static scales of their activations, lowered, and compiled."""

from collections.abc import Callable
from contextlib import closing
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from llmbuild.builder.graph.pipeline import run_passes
from llmbuild.builder.graph.reference import run_steps
from llmbuild.builder.graph.step_graph import StepGraph
from llmbuild.builder.models.config import DecoderConfig
from llmbuild.builder.targets.cpu.emit import emit
from llmbuild.builder.targets.cpu.lower import lower
from llmbuild.builder.targets.cpu.memory import plan_arena
from llmbuild.builder.targets.cpu.pack import packed_bytes, weight_offsets
from llmbuild.builder.targets.cpu.plan import Call, PackedWeight, StepPlan
from llmbuild.builder.verify import make_batches
from llmbuild.plugins.common.kv_pools import LayerPools
from llmbuild.quant.grid import WeightGrid
from llmbuild.quant.plan import QuantPlan
from llmbuild.quant.rtn import round_to_nearest
from llmbuild.runtime.engine import Engine
from llmbuild.runtime.executors.cpu import CpuExecutor
from llmbuild.runtime.manifest import KVLayout, Limits

WIDE = {"hidden_size": 64, "intermediate_size": 96, "num_heads": 4, "head_dim": 16}
INT4 = WeightGrid(4, 32, False)
LIMITS = Limits(max_sequence_length=32, max_step_tokens=23, max_sequences=7)
# Of a step's largest logit. Where a value lies between two int8 codes, engine and reference may
# round it to either, and a row differs by more.
ROUNDING, TIES = 1e-5, 0.1
ScaleOf = Callable[[str, int], NDArray[np.float32] | None]  # of a weight's name, and its groups


def even(name: str, groups: int) -> NDArray[np.float32]:
    """The same for all linears that read a value."""
    steps = {"o_proj": 0.02, "gate_proj": 0.025, "up_proj": 0.025, "down_proj": 0.015}
    return np.full(groups, steps.get(name.split(".")[-2], 0.03), np.float32)


def mixed(name: str, groups: int) -> NDArray[np.float32] | None:
    """Of the attention's input V has scales of its own, of the MLP's up_proj has none; o_proj has
    none either. Norms are up to 4, so that 0.01 saturates."""
    rng = np.random.default_rng(groups)
    match name.split(".")[-2]:
        case "o_proj" | "up_proj":
            return None
        case "v_proj":
            return rng.uniform(0.02, 0.03, groups).astype(np.float32)
    return rng.uniform(0.01, 0.03, groups).astype(np.float32)


def plan_of(step: StepGraph, scale_of: ScaleOf) -> QuantPlan:
    names = [name for name in step.weights if name.endswith(("proj.weight", "lm_head.weight"))]
    scales = {name: scale_of(name, step.weights[name].shape[1] // 32) for name in names}
    given = {name: values for name, values in scales.items() if values is not None}
    grids = dict.fromkeys(names, INT4)
    return QuantPlan(grids, dict.fromkeys(names, 32), activation_scales=given)


@pytest.fixture
def lowered(
    traced: Callable[..., StepGraph],
    decoder_config: Callable[..., DecoderConfig],
    kv_layout: Callable[..., KVLayout],
) -> Callable[[ScaleOf], StepPlan]:
    """lowered(scale_of): a decoder of one layer."""
    one_layer = WIDE | {"num_layers": 1, "windows": (0,), "layer_ropes": (0,)}

    def build(scale_of: ScaleOf) -> StepPlan:
        step = traced(**one_layer)
        run_passes(step, plan=plan_of(step, scale_of))
        config = decoder_config(**one_layer)
        return lower(step, config, kv_layout(config))

    return build


def static_scales(call: Call) -> list[str]:
    names = [each.name for each in call.arguments if isinstance(each, PackedWeight)]
    return [name for name in names if name.endswith(".activation_scales")]


def writes_int8(plan: StepPlan) -> list[Call]:
    return [c for c in plan.calls if any(each.dtype == "int8_rows" for each in c.writes)]


def test_kernels_that_write_int8_rows_take_the_scales(
    lowered: Callable[[ScaleOf], StepPlan],
) -> None:
    plan = lowered(even)
    calls = writes_int8(plan)
    assert [(call.kernel, call.template) for call in calls] == [
        ("rms_norm_int8", (64, 32, 64, "true")),
        ("quantise_rows", (64, 32, 64, "true")),
        ("add_rms_norm_int8", (64, 64, 64, 64, 32, "true")),
        ("gated_activation_int8", (96, 192, 192, 32, "Silu", "true")),
        ("add_rms_norm_int8", (64, 64, 64, 64, 32, "true")),
    ]
    names = [call.arguments[-1].name.removesuffix(".weight.activation_scales") for call in calls]
    assert names == [
        "layers.0.attention.q_proj",
        "layers.0.attention.o_proj",
        "layers.0.mlp.gate_proj",
        "layers.0.mlp.down_proj",
        "layers.0.attention.q_proj",  # the head's are the same
    ]
    assert [call.arguments[-1].shape for call in calls] == [(2,), (2,), (2,), (3,), (2,)]


def test_linears_have_the_calls_that_they_have_with_scales_found_row_by_row(
    lowered: Callable[[ScaleOf], StepPlan],
) -> None:
    static, dynamic = (
        [call.template for call in lowered(scale_of).calls if call.kernel == "int8_linear"]
        for scale_of in (even, lambda name, groups: None)
    )
    assert static == dynamic


def test_a_value_is_rounded_once_for_each_kind_of_scales(
    lowered: Callable[[ScaleOf], StepPlan],
) -> None:
    plan = lowered(mixed)
    calls = writes_int8(plan)
    rounded = [call.template[3:] for call in calls if call.kernel == "quantise_rows"]
    # Q and K, V, attention's rows, gate, up
    assert rounded == [("true",), ("true",), (), ("true",), ()]
    rows = [buffer for call in calls for buffer in call.writes if buffer.dtype == "int8_rows"]
    assert len({buffer.name for buffer in rows}) == len(rows) == 7
    scales_of = {call.writes[-1]: static_scales(call) for call in calls}
    linears = [call.arguments for call in plan.calls if call.kernel == "int8_linear"]
    read = {weight.name.split(".")[-2]: scales_of[x.buffer] for x, weight, *_ in linears}
    assert [name for name, scales in read.items() if not scales] == ["o_proj", "up_proj"]
    assert read["v_proj"] == ["layers.0.attention.v_proj.weight.activation_scales"]
    assert read["k_proj"] == ["layers.0.attention.q_proj.weight.activation_scales"]


def test_scales_are_packed_and_emitted_like_every_constant(
    lowered: Callable[[ScaleOf], StepPlan],
) -> None:
    plan = lowered(even)
    (scales,) = (
        w for w in plan.weights if w.name == "layers.0.mlp.gate_proj.weight.activation_scales"
    )
    assert (scales.dtype, packed_bytes(scales)) == ("fp32", 64)
    source = emit(plan, plan_arena(plan, LIMITS), LIMITS, "m")
    kernel = "gated_activation_int8<96, 192, 192, 32, Silu, true>"
    (line,) = (line for line in source.splitlines() if kernel in line)
    offset = weight_offsets(plan)["layers.0.mlp.down_proj.weight.activation_scales"]
    assert line.endswith(f", R, weight(float{{}}, {offset}));")


@pytest.mark.parametrize("scale_of", [even, mixed])
def test_a_compiled_decoder_with_static_scales_equals_its_reference(
    traced: Callable[..., StepGraph],
    decoder_config: Callable[..., DecoderConfig],
    random_tensors: Callable[[StepGraph], dict[str, NDArray[np.generic]]],
    build_engine: Callable[..., Engine],
    scale_of: ScaleOf,
) -> None:
    step = traced(**WIDE)
    tensors, plan = random_tensors(step), plan_of(step, scale_of)
    run_passes(step, plan=plan)

    def read(name: str) -> Any:
        return round_to_nearest(tensors[name], INT4) if name in plan.weights else tensors[name]

    engine = build_engine(step, decoder_config(**WIDE), read)
    limits, kv = engine.manifest.limits, engine.manifest.kv
    batches, num_blocks = make_batches(limits, kv, engine.manifest.vocab_size, (1, 4, 7))
    shape = (num_blocks, kv.num_kv_heads, kv.block_size, kv.head_dim)
    pools = [LayerPools.filled(shape, layer.k_dtypes, layer.v_dtypes) for layer in kv.layers]
    expected = run_steps(step, read, batches, pools)
    with closing(CpuExecutor(engine, num_blocks, 2)) as executor:
        got = [executor.step(batch) for batch in batches]
    difference = [
        np.abs(ours - theirs).max(axis=1) / np.abs(theirs).max()
        for ours, theirs in zip(got, expected, strict=True)
    ]
    rows = np.concatenate(difference)
    assert np.mean(rows <= ROUNDING) > 0.8
    assert rows.max() <= TIES
