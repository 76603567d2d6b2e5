"""quantise puts the plan's weights on their grids, and leaves all others alone."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

from llmbuild.builder.graph.passes.merge_linears import merge_linears
from llmbuild.builder.graph.passes.quantise import quantise
from llmbuild.builder.graph.step_graph import (
    CODES,
    MINIMA,
    SCALES,
    ZEROS,
    StepGraph,
    Weight,
)
from llmbuild.quant.grid import WeightGrid
from llmbuild.quant.plan import QuantPlan

Kinds = Callable[[StepGraph], list[str]]
ROWS = ("R", 64)
INT4, INT8 = WeightGrid(4, 32, False), WeightGrid(8, 0, True)
FP8 = WeightGrid(8, 0, True, is_fp8=True)
ZERO_POINTS = WeightGrid(4, 32, False, zero_points=True)


def linear(sketch: Any, x: ir.Value, name: str, rows: int, bias: bool = False) -> ir.Value:
    weights = [sketch.weight(name, (rows, 64))]
    weights += [sketch.weight(f"{name}.bias", (rows,))] if bias else []
    return sketch.node("linear", [x, *weights], (x.shape[0], rows))


def names_of(node: ir.Node) -> list[str | None]:
    return [None if value is None else value.name for value in node.inputs]


def attributes_of(node: ir.Node) -> dict[str, Any]:
    return {name: attribute.value for name, attribute in node.attributes.items()}


@pytest.mark.parametrize("activation_group", [0, 32])
@pytest.mark.parametrize("bias", [True, False])
def test_a_linear_reads_the_parts_of_its_matrix(
    sketch: Any, kinds: Kinds, bias: bool, activation_group: int
) -> None:
    x = sketch.input("x", ROWS)
    step = sketch.step(linear(sketch, x, "w", 5, bias))
    shape_and_name = [(str(v.name), tuple(v.shape)) for v in step.graph.outputs]
    quantise(step, QuantPlan({"w": INT4}, {"w": activation_group}))
    assert kinds(step) == ["quantised_linear"]
    (node,) = step.graph
    assert names_of(node) == ["x", "w.codes", "w.scales", "w.minima", "w.bias" if bias else None]
    assert attributes_of(node) == {"zero": 0, "activation_group": activation_group}
    assert [(str(v.name), tuple(v.shape)) for v in step.graph.outputs] == shape_and_name
    parts = {name: weight for name, weight in step.weights.items() if weight.grid is not None}
    assert parts == {
        "w.codes": Weight(("w",), (5, 64), "uint8", INT4, CODES),
        "w.scales": Weight(("w",), (5, 2), "fp16", INT4, SCALES),
        "w.minima": Weight(("w",), (5, 2), "fp16", INT4, MINIMA),
    }
    types = {name: (v.dtype, tuple(v.shape)) for name, v in step.graph.initializers.items()}
    assert types == {
        "w.codes": (ir.DataType.UINT8, (5, 64)),
        "w.scales": (ir.DataType.FLOAT16, (5, 2)),
        "w.minima": (ir.DataType.FLOAT16, (5, 2)),
    } | ({"w.bias": (ir.DataType.FLOAT, (5,))} if bias else {})


def test_a_symmetric_matrix_has_no_minima_and_a_zero(sketch: Any) -> None:
    step = sketch.step(linear(sketch, sketch.input("x", ROWS), "w", 5))
    quantise(step, QuantPlan({"w": INT8}, {"w": 32}))
    (node,) = step.graph
    assert names_of(node) == ["x", "w.codes", "w.scales", None, None]
    assert attributes_of(node) == {"zero": 128, "activation_group": 32}
    assert step.weights["w.scales"] == Weight(("w",), (5, 1), "fp16", INT8, SCALES)


def test_fp8_codes_are_typed_and_have_fp32_scales(sketch: Any, tmp_path: Path) -> None:
    step = sketch.step(linear(sketch, sketch.input("x", ROWS), "w", 5))
    scales = {"w": np.array([0.5], np.float32)}
    quantise(step, QuantPlan({"w": FP8}, {"w": 64}, activation_scales=scales))
    (node,) = step.graph
    assert names_of(node)[:3] == ["x", "w.codes", "w.scales"]
    assert attributes_of(node) == {"zero": 0, "activation_group": 64}
    assert step.weights["w.codes"] == Weight(("w",), (5, 64), "fp8", FP8, CODES)
    assert step.weights["w.scales"] == Weight(("w",), (5, 1), "fp32", FP8, SCALES)
    types = {name: value.dtype for name, value in step.graph.initializers.items()}
    assert types["w.codes"] == ir.DataType.FLOAT8E4M3FN
    assert types["w.scales"] == ir.DataType.FLOAT
    step.save(tmp_path / "step.onnx")
    inputs = {value.name: value.dtype for value in ir.load(tmp_path / "step.onnx").graph.inputs}
    assert inputs["w.codes"] == ir.DataType.FLOAT8E4M3FN


def test_zero_points_come_last_in_place_of_minima(sketch: Any, kinds: Kinds) -> None:
    x, index = sketch.input("x", ROWS), sketch.input("index", ("T",), "int32")
    table = sketch.node(
        "gather_rows", [sketch.weight("t", (7, 64)), index], ("T", 64), attributes={"first": 0}
    )
    outputs = [linear(sketch, x, name, rows, True) for name, rows in (("a", 5), ("b", 1))]
    step = sketch.step(*outputs, table)
    quantise(step, QuantPlan(dict.fromkeys("abt", ZERO_POINTS), dict.fromkeys("ab", 32)))
    merge_linears(step)
    nodes = {node.op_type: node for node in step.graph}
    gather, merged = nodes["gather_quantised_rows"], nodes["quantised_linear"]
    assert names_of(gather) == ["t.codes", "t.scales", None, "index", "t.zeros"]
    stems = ["a+b.codes", "a+b.scales", None, "a.bias+b.bias", "a+b.zeros"]
    assert names_of(merged) == ["x", *stems]
    assert attributes_of(gather) == {"zero": 0, "first": 0}
    assert step.weights["a+b.zeros"] == Weight(("a", "b"), (6, 2), "uint8", ZERO_POINTS, ZEROS)
    assert step.graph.initializers["t.zeros"].dtype == ir.DataType.UINT8


def test_a_table_that_is_the_head_too_is_one_matrix_for_both(sketch: Any, kinds: Kinds) -> None:
    x, index = sketch.input("x", ROWS), sketch.input("index", ("T",), "int32")
    table = sketch.weight("embed.weight", (7, 64))
    rows = sketch.node("gather_rows", [table, index], ("T", 64), attributes={"first": 0})
    step = sketch.step(rows, sketch.node("linear", [x, table], ("R", 7)))
    quantise(step, QuantPlan({"embed.weight": INT4}, {"embed.weight": 32}))
    assert sorted(kinds(step)) == ["gather_quantised_rows", "quantised_linear"]
    gather, head = sorted(step.graph, key=lambda node: node.op_type)
    parts = [f"embed.weight.{part}" for part in (CODES, SCALES, MINIMA)]
    assert names_of(gather) == [*parts, "index"]
    assert attributes_of(gather) == {"zero": 0, "first": 0}
    assert names_of(head) == ["x", *parts, None]
    assert set(step.weights) == set(step.graph.initializers) == set(parts)


def test_what_the_plan_leaves_out_stays(sketch: Any, kinds: Kinds) -> None:
    x, index = sketch.input("x", ROWS), sketch.input("index", ("T",), "int32")
    norm = sketch.node("rms_norm", [x, sketch.weight("n", (64,))], ROWS, attributes={"eps": 1e-5})
    table = sketch.node(
        "gather_rows", [sketch.weight("table", (7, 64)), index], ("T", 64), attributes={"first": 0}
    )
    computed = sketch.node("gather_rows", [norm, index], ("T", 64), attributes={"first": 0})
    outputs = [linear(sketch, norm, name, 5) for name in ("w", "router")]
    step = sketch.step(*outputs, table, computed)
    quantise(step, QuantPlan({"w": INT4}))
    assert sorted(kinds(step)) == [
        *("gather_rows", "gather_rows", "linear", "quantised_linear", "rms_norm"),
    ]
    assert {name for name, weight in step.weights.items() if weight.grid is None} == {
        *("n", "table", "router"),
    }


def test_an_empty_plan_changes_nothing(sketch: Any, kinds: Kinds) -> None:
    step = sketch.step(linear(sketch, sketch.input("x", ROWS), "w", 5, bias=True))
    weights, nodes = dict(step.weights), list(step.graph)
    quantise(step, QuantPlan())
    assert (step.weights, list(step.graph)) == (weights, nodes)


def test_linears_on_one_grid_merge_part_by_part(sketch: Any, kinds: Kinds) -> None:
    x = sketch.input("x", ROWS)
    outputs = [linear(sketch, x, name, rows, True) for name, rows in (("a", 5), ("b", 1))]
    step = sketch.step(*outputs)
    quantise(step, QuantPlan({"a": INT4, "b": INT4}, {"a": 32, "b": 32}))
    merge_linears(step)
    assert sorted(kinds(step)) == ["Constant", "Split", "quantised_linear"]
    (merged,) = (node for node in step.graph if node.op_type == "quantised_linear")
    assert attributes_of(merged) == {"zero": 0, "activation_group": 32}
    assert names_of(merged) == ["x", "a+b.codes", "a+b.scales", "a+b.minima", "a.bias+b.bias"]
    assert step.weights == {
        "a+b.codes": Weight(("a", "b"), (6, 64), "uint8", INT4, CODES),
        "a+b.scales": Weight(("a", "b"), (6, 2), "fp16", INT4, SCALES),
        "a+b.minima": Weight(("a", "b"), (6, 2), "fp16", INT4, MINIMA),
        "a.bias+b.bias": Weight(("a.bias", "b.bias"), (6,), "fp32"),
    }
    types = {name: value.dtype for name, value in step.graph.initializers.items()}
    assert types["a+b.codes"] == ir.DataType.UINT8
    assert types["a+b.scales"] == types["a+b.minima"] == ir.DataType.FLOAT16
    assert types.keys() == step.weights.keys()


@pytest.mark.parametrize(
    "other",
    [
        WeightGrid(4, 64, False),
        WeightGrid(4, 32, True),
        WeightGrid(8, 32, False),
        ZERO_POINTS,
        None,
    ],
    ids=["another group size", "symmetric", "more bits", "zero points", "not quantised"],
)
def test_linears_on_different_grids_stay_apart(
    sketch: Any, kinds: Kinds, other: WeightGrid | None
) -> None:
    x = sketch.input("x", ROWS)
    step = sketch.step(*(linear(sketch, x, name, 5) for name in ("a", "b", "c", "d")))
    grids = {"a": INT4, "c": INT4} | ({} if other is None else {"b": other, "d": other})
    quantise(step, QuantPlan(grids, dict.fromkeys(grids, 32)))
    merge_linears(step)
    sources = {weight.sources for weight in step.weights.values()}
    assert sources == {("a", "c"), ("b", "d")}
    found = kinds(step)
    assert found.count("quantised_linear") + found.count("linear") == 2
