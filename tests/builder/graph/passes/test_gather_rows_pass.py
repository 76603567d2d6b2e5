"""gather_rows takes the place of a look-up of rows, and of no other Gather."""

from collections.abc import Callable
from typing import Any

import onnx_ir as ir
import pytest

from llmbuild.builder.graph.passes.gather_rows import place_gather_rows
from llmbuild.builder.graph.step_graph import StepGraph

Kinds = Callable[[StepGraph], list[str]]


def cast(sketch: Any, value: ir.Value, to: str, onnx_type: ir.DataType) -> ir.Value:
    shape = tuple(value.shape)
    return sketch.node("Cast", [value], shape, dtype=to, attributes={"to": int(onnx_type)})


def test_rows_of_an_fp32_matrix(sketch: Any, kinds: Kinds) -> None:
    table, index = sketch.weight("table", (7, 3)), sketch.input("index", ("R",), "int32")
    step = sketch.step(sketch.node("Gather", [table, index], ("R", 3), attributes={"axis": 0}))
    place_gather_rows(step)
    assert kinds(step) == ["gather_rows"]
    assert step.graph[0].inputs == (table, index)


def test_rows_of_a_bf16_matrix_take_the_cast_with_them(sketch: Any, kinds: Kinds) -> None:
    table, index = sketch.weight("table", (7, 3), "bf16"), sketch.input("index", ("R",), "int32")
    rows = sketch.node("Gather", [table, index], ("R", 3), dtype="bf16", attributes={"axis": 0})
    step = sketch.step(cast(sketch, rows, "fp32", ir.DataType.FLOAT))
    place_gather_rows(step)
    assert kinds(step) == ["gather_rows"]
    assert step.graph.outputs[0].dtype == ir.DataType.FLOAT


def test_bf16_rows_that_are_read_as_such_too_stay(sketch: Any, kinds: Kinds) -> None:
    table, index = sketch.weight("table", (7, 3), "bf16"), sketch.input("index", ("R",), "int32")
    rows = sketch.node("Gather", [table, index], ("R", 3), dtype="bf16", attributes={"axis": 0})
    fp32 = cast(sketch, rows, "fp32", ir.DataType.FLOAT)
    step = sketch.step(fp32, sketch.node("Sigmoid", [rows], ("R", 3), dtype="bf16"))
    place_gather_rows(step)
    assert sorted(kinds(step)) == ["Cast", "Gather", "Sigmoid"]


def test_bf16_rows_cast_to_another_type_stay(sketch: Any, kinds: Kinds) -> None:
    table, index = sketch.weight("table", (7, 3), "bf16"), sketch.input("index", ("R",), "int32")
    rows = sketch.node("Gather", [table, index], ("R", 3), dtype="bf16", attributes={"axis": 0})
    step = sketch.step(cast(sketch, rows, "int32", ir.DataType.INT32))
    place_gather_rows(step)
    assert kinds(step) == ["Gather", "Cast"]


@pytest.mark.parametrize(
    ("table_shape", "index_shape", "axis"),
    [((7, 3), ("R",), 1), ((7,), ("R",), 0), ((7, 3), ("R", 2), 0)],
    ids=["columns", "elements of a vector", "a matrix of indices"],
)
def test_a_gather_of_anything_else_stays(
    sketch: Any,
    kinds: Kinds,
    table_shape: tuple[int, ...],
    index_shape: tuple[Any, ...],
    axis: int,
) -> None:
    table, index = sketch.weight("table", table_shape), sketch.input("index", index_shape, "int32")
    step = sketch.step(sketch.node("Gather", [table, index], ("?",), attributes={"axis": axis}))
    place_gather_rows(step)
    assert kinds(step) == ["Gather"]
