"""gated_activation takes the place of activation(gate) * up where nobody reads between."""

from collections.abc import Callable
from typing import Any

import onnx_ir as ir
import pytest

from llmbuild.builder.graph.passes.gated_activation import place_gated_activation
from llmbuild.builder.graph.step_graph import StepGraph
from llmbuild.plugins.gated_activation.op import ACTIVATIONS

Kinds = Callable[[StepGraph], list[str]]
ROWS = ("T", 5)


def gate_and_up(sketch: Any) -> tuple[ir.Value, ir.Value]:
    x = sketch.input("x", ("T", 3))
    gate, up = (sketch.node("linear", [x, sketch.weight(n, (5, 3))], ROWS) for n in ("g", "u"))
    return gate, up


def activated(sketch: Any, value: ir.Value, kind: str = "silu") -> ir.Value:
    return sketch.node("activation", [value], ROWS, attributes={"kind": kind})


@pytest.mark.parametrize("activated_first", [True, False])
@pytest.mark.parametrize("kind", ACTIVATIONS)
def test_every_activation_is_placed_in_either_order_of_the_factors(
    sketch: Any, kinds: Kinds, kind: str, activated_first: bool
) -> None:
    gate, up = gate_and_up(sketch)
    factors = [activated(sketch, gate, kind), up]
    step = sketch.step(sketch.node("Mul", factors if activated_first else factors[::-1], ROWS))
    place_gated_activation(step)
    assert kinds(step) == ["linear", "linear", "gated_activation"]
    (node,) = (node for node in step.graph if node.op_type == "gated_activation")
    assert node.inputs == (gate, up)
    assert node.attributes["activation"].as_string() == kind


@pytest.mark.parametrize("returned", [True, False], ids=["returned", "read by a node"])
def test_an_activated_gate_that_is_read_twice_keeps_its_nodes(
    sketch: Any, kinds: Kinds, returned: bool
) -> None:
    gate, up = gate_and_up(sketch)
    shared = activated(sketch, gate)
    product = sketch.node("Mul", [shared, up], ROWS)
    step = sketch.step(product, shared if returned else sketch.node("Add", [shared, up], ROWS))
    before = kinds(step)
    place_gated_activation(step)
    assert kinds(step) == before


def test_a_function_that_is_no_activation_stays(sketch: Any, kinds: Kinds) -> None:
    gate, up = gate_and_up(sketch)
    step = sketch.step(sketch.node("Mul", [sketch.node("Sigmoid", [gate], ROWS), up], ROWS))
    before = kinds(step)
    place_gated_activation(step)
    assert kinds(step) == before


def test_activation_that_is_added_stays(sketch: Any, kinds: Kinds) -> None:
    gate, up = gate_and_up(sketch)
    step = sketch.step(sketch.node("Add", [activated(sketch, gate), up], ROWS))
    place_gated_activation(step)
    assert "gated_activation" not in kinds(step)


def test_activation_without_a_product_stays(sketch: Any, kinds: Kinds) -> None:
    gate, _ = gate_and_up(sketch)
    down = sketch.node("linear", [activated(sketch, gate), sketch.weight("d", (2, 5))], ("T", 2))
    step = sketch.step(down)
    place_gated_activation(step)
    assert "gated_activation" not in kinds(step)


def test_activation_without_a_linear_beside_it_stays(sketch: Any, kinds: Kinds) -> None:
    gate, _ = gate_and_up(sketch)
    scale = sketch.input("scale", (1,))
    step = sketch.step(sketch.node("Mul", [activated(sketch, gate), scale], ROWS))
    place_gated_activation(step)
    assert "gated_activation" not in kinds(step)


def test_activation_squared_stays(sketch: Any, kinds: Kinds) -> None:
    gate, _ = gate_and_up(sketch)
    value = activated(sketch, gate)
    step = sketch.step(sketch.node("Mul", [value, value], ROWS))
    place_gated_activation(step)
    assert "gated_activation" not in kinds(step)
