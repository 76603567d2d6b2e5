"""silu(gate) * up, which the export writes as gate * sigmoid(gate) * up, in one node."""

import onnx_ir as ir

from llmbuild.builder.graph.passes.rewrite import made_by, nodes_of, only_user, plugin_node, replace
from llmbuild.builder.graph.step_graph import StepGraph


def place_gated_activation(step: StepGraph) -> None:
    for sigmoid in nodes_of(step.graph, "Sigmoid", ""):
        gate = sigmoid.inputs[0]
        silu = only_user(sigmoid.outputs[0])
        if silu is None or silu.op_type != "Mul" or gate not in silu.inputs:
            continue
        product = only_user(silu.outputs[0])
        if product is None or product.op_type != "Mul":
            continue
        up = _other_input(product, silu.outputs[0])
        if made_by(up, "linear") is None:
            continue
        new = plugin_node("gated_activation", [gate, up], {"activation": "silu"}, outputs=1)
        old = [sigmoid, silu, product]
        replace(step.graph, product, old, [new], product.outputs, new.outputs)


def _other_input(node: ir.Node, one: ir.Value) -> ir.Value | None:
    return node.inputs[1] if node.inputs[0] is one else node.inputs[0]
