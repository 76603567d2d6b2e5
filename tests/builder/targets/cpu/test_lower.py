"""Lowering: every operation becomes the call that its header expects, or the node is named."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

from llmbuild.builder.graph.passes.kv_scales import place_kv_scales
from llmbuild.builder.graph.step_graph import StepGraph
from llmbuild.builder.models.config import NO_ROPE, DecoderConfig, NormConfig, RopeConfig
from llmbuild.builder.targets.cpu.lower import lower
from llmbuild.builder.targets.cpu.plan import (
    Batch,
    Buffer,
    Call,
    Count,
    Layout,
    OwnRows,
    PackedWeight,
    Pool,
    Rows,
    StepInput,
    StepPlan,
)
from llmbuild.errors import BuildError
from llmbuild.runtime.manifest import KVLayout

BLOCK_SIZE = 5


@pytest.fixture
def kv_of(kv_layout: Callable[..., KVLayout]) -> Callable[..., KVLayout]:
    """kv_of(config, *pairs)"""
    return partial(kv_layout, block_size=BLOCK_SIZE)


@pytest.fixture
def plan_of(
    lowerable: Callable[..., StepGraph],
    decoder_config: Callable[..., DecoderConfig],
    kv_of: Callable[..., KVLayout],
) -> Callable[..., StepPlan]:
    """plan_of(precision="fp32", kv=[("fp32", "fp32")], scales=[], **config overrides). scales: the
    layers that have channel scales."""

    def build(
        precision: str = "fp32",
        kv: Sequence[tuple[str, str]] = (("fp32", "fp32"),),
        scales: Sequence[int] = (),
        **overrides: Any,
    ) -> StepPlan:
        config, step = decoder_config(**overrides), lowerable(precision, **overrides)
        ones = np.ones(config.num_kv_heads * config.head_dim, np.float32)
        place_kv_scales(step, {f"layers.{n}.{kind}_scale": ones for n in scales for kind in "kv"})
        return lower(step, config, kv_of(config, *kv))

    return build


def calls(plan: StepPlan, kernel: str) -> list[Call]:
    return [call for call in plan.calls if call.kernel == kernel]


def test_calls_of_a_known_model_with_their_templates(plan_of: Callable[..., StepPlan]) -> None:
    """hidden 20, inner 19, vocabulary 37, 6 heads in 2 groups of head_dim 4: Q 24, K and V 8."""
    plan = plan_of(num_layers=1, windows=(3,))
    assert [(call.kernel, call.template) for call in plan.calls] == [
        ("rope_table", (2,)),
        ("gather_rows", ("float", 20, 20)),
        ("rms_norm", (20, 20, 20, 20)),
        ("linear", ("float", 40, 20, 20, 40)),
        ("rope_kv_write", (*("float",) * 2, 6, 2, 4, BLOCK_SIZE, 40, 40, 40, 24, "false", 4)),
        ("paged_attention", (*("float",) * 2, 6, 2, 4, BLOCK_SIZE, 24, 24, "false", "false")),
        ("gather_rows", ("float", 24, 24)),
        ("linear", ("float", 20, 24, 24, 20)),
        ("gather_rows", ("float", 20, 20)),
        ("add_rms_norm", (20, 20, 20, 20, 20)),
        ("linear", ("float", 38, 20, 20, 38)),
        ("gated_activation", (19, 38, 38, 19, "Silu")),
        ("linear", ("float", 20, 19, 19, 20)),
        ("add_rms_norm", (20, 20, 20, 20, 20)),
        ("linear", ("float", 37, 20, 20, 37)),
    ]


def test_qk_norm_and_dtypes_reach_the_templates(plan_of: Callable[..., StepPlan]) -> None:
    plan = plan_of("bf16", kv=[("bf16", "bf16")], qk_norm="head")
    for call in calls(plan, "rope_kv_write"):
        assert call.template == ("bf16", "bf16", 6, 2, 4, BLOCK_SIZE, 40, 40, 40, 24, "true", 4)
    assert {call.template[0] for call in calls(plan, "linear")} == {"bf16"}
    embedding, *wanted_rows = calls(plan, "gather_rows")
    assert embedding.template == ("bf16", 20, 20)
    assert [call.template[0] for call in wanted_rows] == ["float"] * 2  # of activations


@pytest.mark.parametrize(
    ("pair", "types"),
    [
        (("int8", "int4"), ("int8_t", "int4x2")),
        (("int8-static", "fp32"), ("int8_static", "float")),
        (("bf16", "int8-static"), ("bf16", "int8_static")),
    ],
)
def test_k_and_v_have_types_of_their_own(
    plan_of: Callable[..., StepPlan], pair: tuple[str, str], types: tuple[str, str]
) -> None:
    plan = plan_of("bf16", kv=[pair], scales=range(2))
    for kernel in ("rope_kv_write", "paged_attention"):
        assert [call.template[:6] for call in calls(plan, kernel)] == [
            (*types, 6, 2, 4, BLOCK_SIZE)
        ] * 2


def test_heads_of_other_dtypes_get_calls_of_their_own(plan_of: Callable[..., StepPlan]) -> None:
    """3 query heads of head_dim 4 read a KV head: the second run begins at column 12 of Q, and at 4
    of K and V."""
    pairs = [("int8", "int4"), ("fp32", "fp32")]
    plan = plan_of(kv=pairs, scales=[1], attention_sinks=True, attention_soft_cap=1.0)
    writes, attentions = calls(plan, "rope_kv_write"), calls(plan, "paged_attention")
    assert [call.template[:4] for call in writes] == [
        ("int8_t", "int4x2", 3, 1),
        ("float", "float", 3, 1),
    ] * 2
    assert [call.template[:4] for call in attentions] == [call.template[:4] for call in writes]
    for index, (write, attention) in enumerate(zip(writes, attentions, strict=True)):
        layer, run = divmod(index, 2)
        pools = (Pool(layer, run, "k"), Pool(layer, run, "v"))
        _, q, k, v, *_, k_pool, v_pool, turned, k_scale, v_scale = write.arguments
        assert [(view.column, view.width) for view in (q, k, v, turned)] == [
            (12 * run, 12),
            (24 + 4 * run, 4),
            (32 + 4 * run, 4),
            (12 * run, 12),
        ]
        _, read, *read_pools, _, _, out, _, sinks, _, _, k_again, v_again = attention.arguments
        assert (k_pool, v_pool) == (*read_pools,) == pools
        assert (read, (out.column, out.width)) == (turned, (12 * run, 12))
        assert (k_again, v_again) == (k_scale, v_scale)
        names = [f"layers.{layer}.{name}" for name in ("attention.sinks", "k_scale", "v_scale")]
        for weight, name, item in zip((sinks, k_scale, v_scale), names, (3, 4, 4), strict=True):
            if layer == 0 and weight is not sinks:
                assert weight is None
            elif run == 0:
                assert weight.name == name
            else:
                assert (weight.weight.name, weight.item) == (name, item)


@pytest.mark.parametrize("pair", [("int8-static", "fp32"), ("fp32", "int8-static")])
def test_static_codes_without_channel_scales_are_refused_by_layer(
    plan_of: Callable[..., StepPlan], pair: tuple[str, str]
) -> None:
    kind = "kv"[pair.index("int8-static")]
    with pytest.raises(BuildError, match=rf"layer 1 keeps {kind.upper()} as int8-static .*{kind}_"):
        plan_of(kv=[pair], scales=[0])


def test_arguments_are_the_layers_own(plan_of: Callable[..., StepPlan]) -> None:
    plan = plan_of(windows=(0, 7), qk_norm="head", norm=NormConfig(1e-3))
    for layer, call in enumerate(calls(plan, "rope_kv_write")):
        batch, q, k, v, table, q_norm, k_norm, eps, *pools, turned, _, _ = call.arguments
        assert batch == Batch()
        assert [(view.column, view.width) for view in (q, k, v)] == [(0, 24), (24, 8), (32, 8)]
        assert q.buffer is k.buffer is v.buffer
        assert table.buffer == calls(plan, "rope_table")[0].writes[0]
        assert [w.name for w in (q_norm, k_norm)] == [
            f"layers.{layer}.attention.{name}_norm.weight" for name in "qk"
        ]
        assert (eps, *pools) == (1e-3, Pool(layer, 0, "k"), Pool(layer, 0, "v"))
        assert call.arguments[-2:] == (None, None)  # channel scales
        attention = calls(plan, "paged_attention")[layer]
        *given, out, soft_cap, sinks, parts, count, _, _ = attention.arguments
        assert given == [Batch(), turned, *pools, 0.5, (0, 7)[layer]]
        assert attention.arguments[-2:] == (None, None)
        assert (soft_cap, sinks) == (0.0, None)
        assert attention.writes == (out.buffer,)
        # 6 heads over 128 keys each: 16 values and 2 sums.
        assert (parts.buffer.rows, parts.buffer.width) == (Rows.LONGEST, 1)
        assert count == Count(Rows.LONGEST, rows_each=1)


def test_split_gives_columns_of_the_merged_result(plan_of: Callable[..., StepPlan]) -> None:
    plan = plan_of(num_layers=1, windows=(0,))
    gate, up = calls(plan, "gated_activation")[0].arguments[:2]
    assert gate.buffer == up.buffer == calls(plan, "linear")[2].writes[0]
    assert [(v.column, v.width, v.stride) for v in (gate, up)] == [(0, 19, 38), (19, 19, 38)]


def test_rows_that_need_logits_are_gathered_after_the_last_attention(
    plan_of: Callable[..., StepPlan],
) -> None:
    """Those of its result and of the residual; all that follows is for them alone."""
    plan = plan_of()
    _, *gathers = calls(plan, "gather_rows")
    attention = calls(plan, "paged_attention")[-1]
    for gather, width in zip(gathers, (24, 20), strict=True):
        source, own, index, rows, count = gather.arguments
        assert own == OwnRows(0, Count(Rows.TOKENS))
        assert (source.buffer.rows, rows.buffer.rows) == (Rows.TOKENS, Rows.LOGIT_ROWS)
        assert (source.width, rows.width) == (width, width)
        assert (index, count) == (StepInput("logit_rows"), Count(Rows.LOGIT_ROWS))
    assert gathers[0].arguments[0].buffer in attention.writes
    after = plan.calls[plan.calls.index(attention) + 1 :]
    assert {call.writes[0].rows for call in after} == {Rows.LOGIT_ROWS}
    before = plan.calls[: plan.calls.index(attention)]
    assert {buffer.rows for call in before for buffer in call.writes} == {Rows.TOKENS}
    head = plan.calls[-1]
    assert head.writes == (plan.logits,) == (Buffer("logits", Rows.LOGIT_ROWS, 37),)
    assert head.arguments[-1] == Count(Rows.LOGIT_ROWS)


def test_tied_embedding_is_one_tiled_weight_for_both_its_readers(
    plan_of: Callable[..., StepPlan],
) -> None:
    plan = plan_of("bf16", tie_embeddings=True)
    tiled = PackedWeight("embed.weight", (37, 20), "bf16", Layout.TILES_OF_16)
    (gather,) = calls(plan, "gather_tiled_rows")
    assert gather.template == ("bf16", 20, 20)
    assert gather.arguments[:3] == (tiled, OwnRows(0, 37), StepInput("token_ids"))
    assert plan.calls[-1].arguments[1] == tiled
    assert [weight for weight in plan.weights if "embed" in weight.name] == [tiled]


def test_matrices_of_linears_lie_in_tiles_and_all_else_in_rows(
    plan_of: Callable[..., StepPlan],
) -> None:
    plan = plan_of("bf16", qkv_bias=True, qk_norm="head")
    in_rows = {weight.name for weight in plan.weights if weight.layout is Layout.ROWS}
    assert {name for name in in_rows if not name.startswith("layers.")} == {
        "embed.weight",
        "final_norm.weight",
        "ropes.0.inv_freq",
    }
    for weight in plan.weights:
        if weight.name.startswith("layers."):
            assert (weight.layout is Layout.ROWS) == (len(weight.shape) == 1)
        assert weight.dtype == ("bf16" if len(weight.shape) == 2 else "fp32")


def test_biases_are_passed_and_absent_ones_are_null(plan_of: Callable[..., StepPlan]) -> None:
    linears = calls(plan_of(qkv_bias=True, num_layers=1, windows=(0,)), "linear")
    biases = [call.arguments[2] for call in linears]
    assert biases[0].name == "+".join(f"layers.0.attention.{name}_proj.bias" for name in "qkv")
    assert biases[0].shape == (40,)
    assert biases[1:] == [None] * 4


def test_weights_are_listed_once_in_the_order_of_their_first_use(
    plan_of: Callable[..., StepPlan],
) -> None:
    plan = plan_of()
    used = [a for call in plan.calls for a in call.arguments if isinstance(a, PackedWeight)]
    assert plan.weights == tuple(dict.fromkeys(used))


def test_every_buffer_is_written_before_it_is_read(plan_of: Callable[..., StepPlan]) -> None:
    written: set[Buffer] = set()
    for call in plan_of(qk_norm="head").calls:
        read = {buffer for buffer in call.buffers if buffer.rows is not Rows.LONGEST}
        assert read - set(call.writes) <= written  # LONGEST: memory within a call
        assert not set(call.writes) & written  # each is written once
        written.update(call.writes)


def test_soft_cap_and_sinks_reach_attention(plan_of: Callable[..., StepPlan]) -> None:
    plan = plan_of(attention_soft_cap=1.5, attention_sinks=True)
    for layer, call in enumerate(calls(plan, "paged_attention")):
        assert call.template[-2:] == ("true", "true")
        *_, soft_cap, sinks, _, _, _, _ = call.arguments
        name = f"layers.{layer}.attention.sinks"
        assert (soft_cap, sinks) == (1.5, PackedWeight(name, (6,), "fp32", Layout.ROWS))


def test_layer_that_turns_nothing_or_a_part_says_so(plan_of: Callable[..., StepPlan]) -> None:
    plan = plan_of(ropes=(RopeConfig("default", 1e4, 2),), layer_ropes=(NO_ROPE, 0))
    none, part = calls(plan, "rope_kv_write")
    assert (none.template[-1], none.arguments[4]) == (0, None)
    assert (part.template[-1], part.arguments[4].width) == (2, 2)
    (table,) = calls(plan, "rope_table")
    assert (table.template, part.arguments[4].buffer) == ((1,), table.writes[0])
    for write, attention in zip((none, part), calls(plan, "paged_attention"), strict=True):
        assert attention.arguments[1].buffer == write.writes[0]  # so it runs after the write


def test_tables_that_follow_a_sequences_length_get_the_batch(
    plan_of: Callable[..., StepPlan],
) -> None:
    longrope = RopeConfig(
        *("longrope", 1e4, 4),
        factors=(1.0, 2.0),
        long_factors=(3.0, 4.0),
        original_max_position=9,
        attention_factor=1.25,
    )
    dynamic = RopeConfig("dynamic", 5e5, 2, factor=2.0, original_max_position=7)
    plan = plan_of(ropes=(longrope, dynamic), layer_ropes=(0, 1))
    (switched,) = calls(plan, "switched_rope_table")
    frequencies = PackedWeight("ropes.0.inv_freq", (2, 2), "fp32", Layout.ROWS)
    assert switched.template == (2,)
    assert switched.arguments[:-1] == (Batch(), frequencies, 9, 1.25)
    (grown,) = calls(plan, "dynamic_rope_table")
    assert grown.template == (1,)
    assert grown.arguments[:-1] == (Batch(), 5e5, 2.0, 7, 1.0)
    for table, write in zip((switched, grown), calls(plan, "rope_kv_write"), strict=True):
        assert table.writes == (table.arguments[-1].buffer,)
        assert write.arguments[4].buffer == table.writes[0]


@pytest.mark.parametrize("bias", [True, False])
def test_layer_norm_has_its_own_kernel(plan_of: Callable[..., StepPlan], bias: bool) -> None:
    plan = plan_of(norm=NormConfig(1e-3, "layer", bias=bias))
    norms = calls(plan, "layer_norm")
    assert [call.template for call in norms] == [(20, 20, 20)] * 5
    _, weight, shift, eps, _, rows = norms[0].arguments
    assert (weight.name, eps, rows) == ("layers.0.attn_norm.weight", 1e-3, Count(Rows.TOKENS))
    assert (shift.name if bias else shift) == ("layers.0.attn_norm.bias" if bias else None)


@pytest.mark.parametrize("domain", ["", "llmbuild"])
def test_unknown_operation_is_refused_by_name(
    lowerable: Callable[..., StepGraph],
    decoder_config: Callable[..., DecoderConfig],
    kv_of: Callable[..., KVLayout],
    domain: str,
) -> None:
    step = lowerable()
    norm = next(node for node in step.graph if node.op_type == "rms_norm")
    norm.domain, norm.op_type = domain, "Wavelet"
    with pytest.raises(BuildError) as caught:
        lower(step, decoder_config(), kv_of(decoder_config(), ("fp32", "fp32")))
    name = str(norm.outputs[0].name)
    assert f"{domain or 'ai.onnx'}::Wavelet, which makes {name!r}" in str(caught.value)
    assert "paged_attention" in str(caught.value)  # what is implemented


def test_unfused_graph_is_refused(
    traced: Callable[..., StepGraph],
    decoder_config: Callable[..., DecoderConfig],
    kv_of: Callable[..., KVLayout],
) -> None:
    with pytest.raises(BuildError, match="has no implementation of"):
        lower(traced(), decoder_config(), kv_of(decoder_config(), ("fp32", "fp32")))


def test_constant_that_no_split_reads_is_refused(
    lowerable: Callable[..., StepGraph],
    decoder_config: Callable[..., DecoderConfig],
    kv_of: Callable[..., KVLayout],
) -> None:
    step = lowerable()
    norm = next(node for node in step.graph if node.op_type == "rms_norm")
    constant = ir.node("Constant", [], {"value_ints": [3]})
    step.graph.insert_before(norm, constant)
    norm.replace_input_with(1, constant.outputs[0])
    with pytest.raises(BuildError, match=r"Constant read by \{'rms_norm'\}"):
        lower(step, decoder_config(), kv_of(decoder_config(), ("fp32", "fp32")))
