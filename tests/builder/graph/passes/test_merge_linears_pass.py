"""merge_linears joins linears of one input, unless their weights don't belong together."""

from collections.abc import Callable
from typing import Any

import onnx_ir as ir
import pytest

from llmbuild.builder.graph.passes.merge_linears import merge_linears
from llmbuild.builder.graph.step_graph import StepGraph, Weight

Kinds = Callable[[StepGraph], list[str]]
ROWS = ("R", 3)


def linear(sketch: Any, x: ir.Value, weight: ir.Value, bias: ir.Value | None = None) -> ir.Value:
    inputs = [x, weight] if bias is None else [x, weight, bias]
    return sketch.node("linear", inputs, (x.shape[0], weight.shape[0]))


def test_three_linears_become_one_whose_result_is_split(sketch: Any, kinds: Kinds) -> None:
    x = sketch.input("x", ROWS)
    outputs = [
        linear(sketch, x, sketch.weight(f"{n}.w", (rows, 3)), sketch.weight(f"{n}.b", (rows,)))
        for n, rows in (("a", 5), ("b", 1), ("c", 2))
    ]
    step = sketch.step(*outputs)
    merge_linears(step)
    assert sorted(kinds(step)) == ["Constant", "Split", "linear"]
    (merged,) = (node for node in step.graph if node.op_type == "linear")
    assert [str(dim) for dim in merged.outputs[0].shape] == ["R", "8"]
    assert {str(v.name) for v in merged.inputs[1:]} == set(step.weights)
    assert [step.weights[str(v.name)] for v in merged.inputs[1:]] == [
        Weight(("a.w", "b.w", "c.w"), (8, 3), "fp32"),
        Weight(("a.b", "b.b", "c.b"), (8,), "fp32"),
    ]
    assert set(step.graph.initializers) == set(step.weights)
    (split,) = (node for node in step.graph if node.op_type == "Split")
    assert list(step.graph.outputs) == list(split.outputs)
    assert [value.shape[1] for value in split.outputs] == [5, 1, 2]


def test_linears_of_different_inputs_stay(sketch: Any, kinds: Kinds) -> None:
    outputs = [
        linear(sketch, sketch.input(name, ROWS), sketch.weight(f"{name}.w", (5, 3)))
        for name in "xy"
    ]
    step = sketch.step(*outputs)
    merge_linears(step)
    assert kinds(step) == ["linear", "linear"]


def test_linears_of_different_dtypes_stay(sketch: Any, kinds: Kinds) -> None:
    x = sketch.input("x", ROWS)
    weights = [sketch.weight("a", (5, 3), "fp32"), sketch.weight("b", (5, 3), "bf16")]
    step = sketch.step(*(linear(sketch, x, weight) for weight in weights))
    merge_linears(step)
    assert kinds(step) == ["linear", "linear"]


def test_linears_with_and_without_bias_merge_each_among_themselves(
    sketch: Any, kinds: Kinds
) -> None:
    x = sketch.input("x", ROWS)
    outputs = [
        linear(
            sketch,
            x,
            sketch.weight(f"{name}.w", (5, 3)),
            sketch.weight(f"{name}.b", (5,)) if name in "ac" else None,
        )
        for name in "abcd"
    ]
    step = sketch.step(*outputs)
    merge_linears(step)
    assert sorted(weight.sources for weight in step.weights.values()) == [
        ("a.b", "c.b"),
        ("a.w", "c.w"),
        ("b.w", "d.w"),
    ]
    assert kinds(step).count("linear") == 2


@pytest.mark.parametrize("by", ["another linear", "a gather"])
def test_weight_that_another_node_reads_stays_whole(sketch: Any, kinds: Kinds, by: str) -> None:
    """A tied embedding is one tensor for all its readers."""
    x, y = sketch.input("x", ROWS), sketch.input("y", ROWS)
    index = sketch.input("index", ("T",), "int32")
    shared, own, own_too = (sketch.weight(name, (5, 3)) for name in ("shared", "own", "own_too"))
    outputs = [linear(sketch, x, weight) for weight in (shared, own, own_too)]
    other = {
        "another linear": lambda: linear(sketch, y, shared),
        "a gather": lambda: sketch.node(
            "gather_rows", [shared, index], ("T", 3), attributes={"first": 0}
        ),
    }[by]()
    step = sketch.step(*outputs, other)
    merge_linears(step)
    assert set(step.weights) == {"shared", "own+own_too"}
    assert other.producer().inputs[0 if by == "a gather" else 1] is shared
    assert step.graph.outputs[0].producer().inputs == (x, shared)


def test_bias_that_two_linears_share_keeps_them_apart(sketch: Any, kinds: Kinds) -> None:
    x, bias = sketch.input("x", ROWS), sketch.weight("bias", (5,))
    outputs = [linear(sketch, x, sketch.weight(name, (5, 3)), bias) for name in "ab"]
    step = sketch.step(*outputs)
    merge_linears(step)
    assert kinds(step) == ["linear", "linear"]
    assert set(step.weights) == {"a", "b", "bias"}


def test_linear_of_a_computed_matrix_stays(sketch: Any, kinds: Kinds) -> None:
    x = sketch.input("x", ROWS)
    computed = sketch.node("Sigmoid", [sketch.weight("a", (5, 3))], (5, 3))
    outputs = [linear(sketch, x, computed), linear(sketch, x, sketch.weight("b", (5, 3)))]
    step = sketch.step(*outputs)
    merge_linears(step)
    assert sorted(kinds(step)) == ["Sigmoid", "linear", "linear"]
