"""add_rms_norm takes the place of a residual add and the norm of its whole rows."""

from collections.abc import Callable
from typing import Any

import onnx_ir as ir

from llmbuild.builder.graph.passes.add_rms_norm import place_add_rms_norm
from llmbuild.builder.graph.step_graph import StepGraph

Kinds = Callable[[StepGraph], list[str]]
ROWS = ("T", 6)
EPS = {"eps": 0.25}


def residual_and_x(sketch: Any) -> tuple[ir.Value, ir.Value]:
    return sketch.input("residual", ROWS), sketch.input("x", ROWS)


def test_both_the_sum_and_its_norm_stay_readable(sketch: Any, kinds: Kinds) -> None:
    residual, x = residual_and_x(sketch)
    total, weight = sketch.node("Add", [residual, x], ROWS), sketch.weight("w", (6,))
    norm = sketch.node("rms_norm", [total, weight], ROWS, attributes=EPS)
    step = sketch.step(sketch.node("Add", [total, norm], ROWS))
    place_add_rms_norm(step)
    assert kinds(step) == ["add_rms_norm", "Add"]
    fused, after = step.graph
    assert fused.inputs == (x, residual, weight)
    assert fused.attributes["eps"].as_float() == 0.25
    assert after.inputs == fused.outputs


def test_of_two_norms_of_one_sum_the_second_reads_the_fused_sum(sketch: Any, kinds: Kinds) -> None:
    residual, x = residual_and_x(sketch)
    total = sketch.node("Add", [residual, x], ROWS)
    norms = [
        sketch.node("rms_norm", [total, sketch.weight(name, (6,))], ROWS, attributes=EPS)
        for name in "vw"
    ]
    step = sketch.step(*norms)
    place_add_rms_norm(step)
    assert kinds(step) == ["add_rms_norm", "rms_norm"]
    fused, second = step.graph
    assert second.inputs[0] is fused.outputs[0]
    assert list(step.graph.outputs) == [fused.outputs[1], second.outputs[0]]


def test_norm_of_what_no_add_makes_stays(sketch: Any, kinds: Kinds) -> None:
    x, weight = sketch.input("x", ROWS), sketch.weight("w", (6,))
    step = sketch.step(sketch.node("rms_norm", [x, weight], ROWS, attributes=EPS))
    place_add_rms_norm(step)
    assert kinds(step) == ["rms_norm"]


def test_norm_over_parts_of_a_row_stays(sketch: Any, kinds: Kinds) -> None:
    total = sketch.node("Add", residual_and_x(sketch), ROWS)
    step = sketch.step(
        sketch.node("rms_norm", [total, sketch.weight("w", (3,))], ROWS, attributes=EPS)
    )
    place_add_rms_norm(step)
    assert kinds(step) == ["Add", "rms_norm"]


def test_add_that_broadcasts_stays(sketch: Any, kinds: Kinds) -> None:
    x, bias = sketch.input("x", ROWS), sketch.weight("bias", (6,))
    total = sketch.node("Add", [x, bias], ROWS)
    step = sketch.step(
        sketch.node("rms_norm", [total, sketch.weight("w", (6,))], ROWS, attributes=EPS)
    )
    place_add_rms_norm(step)
    assert kinds(step) == ["Add", "rms_norm"]
