"""Lowering of elementwise operations: few calls, no second copy, and the numbers of numpy."""

import math
from collections.abc import Callable, Sequence
from contextlib import closing
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
from numpy.typing import NDArray

from llmbuild.builder.graph.step_graph import StepGraph
from llmbuild.builder.models.config import DecoderConfig
from llmbuild.builder.targets.cpu.lower import lower
from llmbuild.builder.targets.cpu.memory import plan_arena
from llmbuild.builder.targets.cpu.plan import Call, Count, Expression, Rows, StepPlan, View
from llmbuild.plugins.gated_activation.op import ACTIVATIONS
from llmbuild.runtime.batch import StepBatch
from llmbuild.runtime.engine import Engine
from llmbuild.runtime.executors.cpu import CpuExecutor
from llmbuild.runtime.manifest import KVLayout, Limits

WIDTH, VOCAB = 19, 37  # of the drawn graphs' results; rows of their tables
LIMITS = Limits(max_sequence_length=32, max_step_tokens=24, max_sequences=7)


class Drawn:
    """A graph of elementwise operations over the rows of tables that token_ids choose."""

    def __init__(self, sketch: Any, config: DecoderConfig, kv: KVLayout) -> None:
        self.sketch, self.config, self.kv = sketch, config, kv
        self.tokens = sketch.input("token_ids", ("T",), "int32")
        self.widths: dict[str, int] = {}

    def rows(self, name: str, width: int = WIDTH) -> ir.Value:
        self.widths[name] = width
        table = self.sketch.weight(name, (VOCAB, width))
        return self.sketch.node(
            "gather_rows", [table, self.tokens], ("T", width), attributes={"first": 0}
        )

    def number(self, value: float) -> ir.Value:
        attributes = {"value": ir.tensor(np.array(value, np.float32))}
        return self.sketch.node("Constant", [], (), attributes=attributes)

    def op(
        self, op_type: str, *inputs: ir.Value | float, width: int = WIDTH, **attributes: str
    ) -> ir.Value:
        values = [self.number(i) if isinstance(i, float) else i for i in inputs]
        return self.sketch.node(op_type, values, ("T", width), attributes=attributes)

    def step(self, output: ir.Value) -> StepGraph:
        return self.sketch.step(output)

    def plan(self, output: ir.Value) -> StepPlan:
        return lower(self.step(output), self.config, self.kv)


@pytest.fixture
def drawn(
    sketch: Any,
    decoder_config: Callable[..., DecoderConfig],
    kv_layout: Callable[..., KVLayout],
) -> Drawn:
    config = decoder_config(vocab_size=WIDTH)
    return Drawn(sketch, config, kv_layout(config))


def kernels(plan: StepPlan) -> list[str]:
    return [call.kernel for call in plan.calls]


def elementwise(plan: StepPlan) -> list[Call]:
    return [call for call in plan.calls if call.kernel == "elementwise"]


def whole(call: Call) -> View:
    """All of the buffer that a call writes first."""
    return View(call.writes[0], 0, call.writes[0].width)


def test_a_chain_becomes_one_call(drawn: Drawn) -> None:
    a, b = drawn.rows("a"), drawn.rows("b")
    scaled = drawn.op("Mul", a, 2.5)
    capped = drawn.op("Mul", drawn.op("Tanh", drawn.op("Div", scaled, 3.0)), 3.0)
    plan = drawn.plan(drawn.op("Add", b, capped))
    assert kernels(plan) == ["gather_rows", "gather_rows", "elementwise"]
    x, residual = (whole(call) for call in plan.calls[:2])
    y, rows, value = plan.calls[-1].arguments
    tanh = Expression("Mul", (x, 2.5), WIDTH)
    for operation, more in (("Div", (3.0,)), ("Tanh::apply", ()), ("Mul", (3.0,))):
        tanh = Expression(operation, (tanh, *more), WIDTH)
    assert value == Expression("Add", (residual, tanh), WIDTH)
    assert rows == Count(Rows.TOKENS)
    assert plan.calls[-1].template == (WIDTH, WIDTH)
    assert y == residual  # which nothing reads afterwards


def test_result_takes_the_place_of_an_operand_that_dies(drawn: Drawn) -> None:
    plan = drawn.plan(drawn.op("Tanh", drawn.op("Mul", drawn.rows("a"), 0.5)))
    (call,) = elementwise(plan)
    assert call.writes == (plan.calls[0].writes[0],) == (plan.logits,)
    assert plan_arena(plan, LIMITS).offsets == {}  # all of it is the caller's buffer


def test_operand_that_is_read_again_is_not_overwritten(drawn: Drawn) -> None:
    a = drawn.rows("a")
    table = drawn.sketch.weight("norm.weight", (WIDTH,))
    capped = drawn.op("Tanh", a)
    normed = drawn.sketch.node("rms_norm", [capped, table], ("T", WIDTH), attributes={"eps": 1e-5})
    plan = drawn.plan(drawn.op("Add", normed, a))
    first, last = elementwise(plan)
    kept = plan.calls[0].writes[0]
    assert kept not in first.writes
    assert View(kept, 0, WIDTH) in last.arguments[2].operands


def test_columns_of_a_wider_buffer_are_not_overwritten(drawn: Drawn) -> None:
    """Q, K and V lie side by side: what is computed of one has a place of its own."""
    whole_rows = drawn.rows("a", 2 * WIDTH)
    sizes = drawn.sketch.node(
        "Constant", [], (2,), dtype="int64", attributes={"value_ints": [WIDTH, WIDTH]}
    )
    left, right = drawn.sketch.node(
        "Split", [whole_rows, sizes], ("T", WIDTH), ("T", WIDTH), attributes={"axis": 1}
    )
    plan = drawn.plan(drawn.op("Sub", left, right))
    (call,) = elementwise(plan)
    source = plan.calls[0].writes[0]
    assert source not in call.writes
    columns = [(view.buffer, view.column) for view in call.arguments[2].operands]
    assert columns == [(source, 0), (source, WIDTH)]


def test_value_with_several_readers_is_computed_once(drawn: Drawn) -> None:
    a, b = drawn.rows("a"), drawn.rows("b")
    shared = drawn.op("Mul", drawn.op("Sigmoid", a), b)
    plan = drawn.plan(drawn.op("Add", drawn.op("Tanh", shared), drawn.op("Mul", shared, 2.0)))
    first, last = elementwise(plan)
    assert "Sigmoid" in repr(first.arguments[2])
    assert "Sigmoid" not in repr(last.arguments[2])
    assert repr(last.arguments[2]).count(repr(first.writes[0])) == 2


def test_a_single_column_gives_its_place_to_nothing_wider(drawn: Drawn) -> None:
    """The narrow buffer dies here, and is the only one that does."""
    a, gate = drawn.rows("a"), drawn.rows("gate", 1)
    scaled = drawn.op("Mul", drawn.op("Sigmoid", gate, width=1), a)
    plan = drawn.plan(drawn.op("Add", scaled, a))
    (call,) = elementwise(plan)
    assert call.writes[0].width == WIDTH
    assert call.writes[0] not in [gather.writes[0] for gather in plan.calls[:2]]


def test_capped_logits_are_never_held_twice(
    lowerable: Callable[..., StepGraph],
    decoder_config: Callable[..., DecoderConfig],
    kv_layout: Callable[..., KVLayout],
) -> None:
    overrides = {"logit_scale": 0.5, "logit_soft_cap": 30.0}
    config = decoder_config(**overrides)
    plan = lower(lowerable(**overrides), config, kv_layout(config))
    *_, head, cap = plan.calls
    assert (head.kernel, cap.kernel) == ("linear", "elementwise")
    assert head.writes == cap.writes == (plan.logits,)
    assert cap.arguments[2].buffers == {plan.logits}
    wide = {buffer for call in plan.calls for buffer in call.buffers if buffer.width == 37}
    assert wide == {plan.logits}
    assert plan.logits not in plan_arena(plan, LIMITS).offsets


def gelu(x: float) -> float:
    return x * (1 + math.erf(x / math.sqrt(2))) / 2


FUNCTIONS: dict[str, Callable[[NDArray[np.float64]], NDArray[np.float64]]] = {
    "silu": lambda x: x / (1 + np.exp(-x)),
    "gelu": np.vectorize(gelu),
    "gelu_tanh": lambda x: x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))) / 2,
    "relu": lambda x: np.maximum(x, 0),
    "relu2": lambda x: np.maximum(x, 0) ** 2,
}


def batch_of(tokens: Sequence[int]) -> StepBatch:
    """One sequence whose every row is wanted; drawn graphs read its token ids alone."""
    rows = np.arange(len(tokens), dtype=np.int32)
    return StepBatch(
        token_ids=np.array(tokens, np.int32),
        positions=rows,
        query_start=np.array([0, len(tokens)], np.int32),
        kv_lengths=np.array([len(tokens)], np.int32),
        block_tables=np.arange(1, 9, dtype=np.int32)[None],
        logit_rows=rows,
    )


def test_compiled_chain_equals_numpy(drawn: Drawn, build_engine: Callable[..., Engine]) -> None:
    """Every operator and function, numbers on either side, a deep column, a shared value."""
    a, b, gate = drawn.rows("a"), drawn.rows("b"), drawn.rows("gate", 1)
    weight = drawn.op("Sigmoid", drawn.op("Mul", gate, 2.0, width=1), width=1)
    shared = drawn.op("Sub", 1.5, drawn.op("Mul", weight, a))
    total = drawn.op("Div", drawn.op("Tanh", drawn.op("Div", shared, 0.75)), 1e-2)
    for scale, kind in enumerate(ACTIVATIONS, start=1):
        part = drawn.op("activation", drawn.op("Mul", b, float(scale)), kind=kind)
        total = drawn.op("Add", total, part)
    step = drawn.step(drawn.op("Mul", total, drawn.op("Sub", shared, gate)))
    rng = np.random.default_rng(0)
    tables = {
        name: rng.standard_normal((VOCAB, width)).astype(np.float32)
        for name, width in drawn.widths.items()
    }
    engine = build_engine(step, drawn.config, tables.__getitem__)

    left, right, column = (tables[name].astype(np.float64) for name in ("a", "b", "gate"))
    capped = 1.5 - left / (1 + np.exp(-2 * column))
    expected = np.tanh(capped / 0.75) / 1e-2
    for scale, kind in enumerate(ACTIVATIONS, start=1):
        expected += FUNCTIONS[kind](scale * right)
    expected *= capped - column
    bound = 1e-6 * np.abs(expected).max()
    with closing(CpuExecutor(engine, num_blocks=9, num_threads=2)) as executor:
        for tokens in ([5], [0, 36, 7], rng.integers(0, VOCAB, 24).tolist()):
            got = executor.step(batch_of(tokens))
            assert got.shape == (len(tokens), WIDTH)
            np.testing.assert_allclose(got, expected[tokens], rtol=0, atol=bound)
