"""fold drops what the export leaves behind, and only that."""

from collections.abc import Callable
from typing import Any

import onnx_ir as ir
import pytest

from llmbuild.builder.graph.passes.fold import fold
from llmbuild.builder.graph.step_graph import StepGraph

Kinds = Callable[[StepGraph], list[str]]
TO_INT64 = {"to": int(ir.DataType.INT64)}


def shape_of(sketch: Any, *sizes: int) -> ir.Value:
    return sketch.node(
        "Constant", [], (len(sizes),), dtype="int64", attributes={"value_ints": sizes}
    )


def gather(sketch: Any, table: ir.Value, index: ir.Value) -> ir.Value:
    return sketch.node("Gather", [table, index], ("R", 3), attributes={"axis": 0})


def test_reshape_of_a_vector_and_its_widening_disappear(sketch: Any, kinds: Kinds) -> None:
    table, index = sketch.weight("table", (7, 3)), sketch.input("index", ("R",), "int32")
    flat = sketch.node("Reshape", [index, shape_of(sketch, -1)], ("R",), dtype="int32")
    wide = sketch.node("Cast", [flat], ("R",), dtype="int64", attributes=TO_INT64)
    rows = gather(sketch, table, wide)
    step = sketch.step(rows)
    fold(step)
    assert kinds(step) == ["Gather"]
    assert rows.producer().inputs == (table, index)


@pytest.mark.parametrize(("rows", "sizes"), [(("T", 6), (-1,)), (("T",), (2, -1))])
def test_reshape_that_changes_a_shape_stays(
    sketch: Any, kinds: Kinds, rows: tuple[Any, ...], sizes: tuple[int, ...]
) -> None:
    x = sketch.input("x", rows)
    y = sketch.node("Reshape", [x, shape_of(sketch, *sizes)], ("T2",))
    step = sketch.step(sketch.node("Sigmoid", [y], ("T2",)))
    fold(step)
    assert kinds(step) == ["Constant", "Reshape", "Sigmoid"]


def test_widening_that_more_than_indices_depend_on_stays(sketch: Any, kinds: Kinds) -> None:
    table, index = sketch.weight("table", (7, 3)), sketch.input("index", ("R",), "int32")
    wide = sketch.node("Cast", [index], ("R",), dtype="int64", attributes=TO_INT64)
    step = sketch.step(gather(sketch, table, wide), sketch.node("Add", [wide, wide], ("R",)))
    fold(step)
    assert sorted(kinds(step)) == ["Add", "Cast", "Gather"]


def test_widening_of_the_table_itself_stays(sketch: Any, kinds: Kinds) -> None:
    table, index = sketch.input("table", (7, 3), "int32"), sketch.input("index", ("R",), "int32")
    wide = sketch.node("Cast", [table], (7, 3), dtype="int64", attributes=TO_INT64)
    step = sketch.step(gather(sketch, wide, index))
    fold(step)
    assert kinds(step) == ["Cast", "Gather"]


def test_cast_to_another_type_stays(sketch: Any, kinds: Kinds) -> None:
    table, index = sketch.weight("table", (7, 3)), sketch.input("index", ("R",), "fp32")
    wide = sketch.node("Cast", [index], ("R",), dtype="int64", attributes=TO_INT64)
    step = sketch.step(gather(sketch, table, wide))
    fold(step)
    assert kinds(step) == ["Cast", "Gather"]


def test_chain_that_nothing_reads_goes_and_a_half_read_node_stays(
    sketch: Any, kinds: Kinds
) -> None:
    x = sketch.input("x", ("T", 4))
    sketch.node("Sigmoid", [sketch.node("Sigmoid", [x], ("T", 4))], ("T", 4))
    low, _ = sketch.node("Split", [x, shape_of(sketch, 2, 2)], ("T", 2), ("T", 2))
    step = sketch.step(low)
    fold(step)
    assert kinds(step) == ["Constant", "Split"]
