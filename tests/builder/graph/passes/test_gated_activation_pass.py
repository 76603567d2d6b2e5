"""gated_activation takes the place of gate * sigmoid(gate) * up where nobody reads between."""

from collections.abc import Callable
from typing import Any

import onnx_ir as ir
import pytest

from llmbuild.builder.graph.passes.gated_activation import place_gated_activation
from llmbuild.builder.graph.step_graph import StepGraph

Kinds = Callable[[StepGraph], list[str]]
ROWS = ("T", 5)


def gate_and_up(sketch: Any) -> tuple[ir.Value, ir.Value]:
    x = sketch.input("x", ("T", 3))
    gate, up = (sketch.node("linear", [x, sketch.weight(n, (5, 3))], ROWS) for n in ("g", "u"))
    return gate, up


@pytest.mark.parametrize("gate_first", [True, False])
@pytest.mark.parametrize("silu_first", [True, False])
def test_every_order_of_the_factors_is_found(
    sketch: Any, kinds: Kinds, gate_first: bool, silu_first: bool
) -> None:
    gate, up = gate_and_up(sketch)
    factors = [gate, sketch.node("Sigmoid", [gate], ROWS)]
    silu = sketch.node("Mul", factors if gate_first else factors[::-1], ROWS)
    step = sketch.step(sketch.node("Mul", [silu, up] if silu_first else [up, silu], ROWS))
    place_gated_activation(step)
    assert kinds(step) == ["linear", "linear", "gated_activation"]
    (node,) = (node for node in step.graph if node.op_type == "gated_activation")
    assert node.inputs == (gate, up)
    assert node.attributes["activation"].as_string() == "silu"


@pytest.mark.parametrize("which", ["sigmoid", "silu"])
@pytest.mark.parametrize("returned", [True, False], ids=["returned", "read by a node"])
def test_a_value_between_that_is_read_twice_keeps_its_nodes(
    sketch: Any, kinds: Kinds, which: str, returned: bool
) -> None:
    gate, up = gate_and_up(sketch)
    sigmoid = sketch.node("Sigmoid", [gate], ROWS)
    silu = sketch.node("Mul", [gate, sigmoid], ROWS)
    product = sketch.node("Mul", [silu, up], ROWS)
    shared = {"sigmoid": sigmoid, "silu": silu}[which]
    step = sketch.step(product, shared if returned else sketch.node("Add", [shared, up], ROWS))
    before = kinds(step)
    place_gated_activation(step)
    assert kinds(step) == before


def test_sigmoid_of_one_value_times_another_is_no_silu(sketch: Any, kinds: Kinds) -> None:
    gate, up = gate_and_up(sketch)
    sigmoid = sketch.node("Sigmoid", [gate], ROWS)
    step = sketch.step(sketch.node("Mul", [sketch.node("Mul", [sigmoid, up], ROWS), up], ROWS))
    place_gated_activation(step)
    assert "gated_activation" not in kinds(step)


def test_silu_without_a_linear_beside_it_stays(sketch: Any, kinds: Kinds) -> None:
    gate, _ = gate_and_up(sketch)
    scale = sketch.input("scale", (1,))
    silu = sketch.node("Mul", [gate, sketch.node("Sigmoid", [gate], ROWS)], ROWS)
    step = sketch.step(sketch.node("Mul", [silu, scale], ROWS))
    place_gated_activation(step)
    assert "gated_activation" not in kinds(step)


def test_silu_squared_stays(sketch: Any, kinds: Kinds) -> None:
    gate, _ = gate_and_up(sketch)
    silu = sketch.node("Mul", [gate, sketch.node("Sigmoid", [gate], ROWS)], ROWS)
    step = sketch.step(sketch.node("Mul", [silu, silu], ROWS))
    place_gated_activation(step)
    assert "gated_activation" not in kinds(step)
