"""The residual add and the RMSNorm that reads it, in one node that returns both."""

import onnx_ir as ir

from llmbuild.builder.graph.passes.rewrite import made_by, nodes_of, plugin_node, replace
from llmbuild.builder.graph.step_graph import StepGraph


def place_add_rms_norm(step: StepGraph) -> None:
    for norm in nodes_of(step.graph, "rms_norm"):
        total, weight = norm.inputs
        add = made_by(total, "Add", "")
        if add is None:
            continue
        residual, x = add.inputs
        if not (_shape(residual) == _shape(x) and _shape(weight) == _shape(x)[-1:]):
            continue  # the add broadcasts, or the norm is over parts of a row
        eps = norm.attributes["eps"].as_float()
        new = plugin_node("add_rms_norm", [x, residual, weight], {"eps": eps}, outputs=2)
        old_values = [add.outputs[0], norm.outputs[0]]
        replace(step.graph, add, [add, norm], [new], old_values, new.outputs)


def _shape(value: ir.Value | None) -> tuple[object, ...]:
    assert value is not None
    return tuple(value.shape or ())
