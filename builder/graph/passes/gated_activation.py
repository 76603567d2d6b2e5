"""act(gate) * up in one node."""

import onnx_ir as ir

from llmbuild.builder.graph.passes.rewrite import made_by, nodes_of, only_user, plugin_node, replace
from llmbuild.builder.graph.step_graph import StepGraph


def place_gated_activation(step: StepGraph) -> None:
    for activation in nodes_of(step.graph, "activation"):
        product = only_user(activation.outputs[0])
        if product is None or product.op_type != "Mul":
            continue
        up = _other_input(product, activation.outputs[0])
        if not _is_projected(up):
            continue
        kind = activation.attributes["kind"].as_string()
        gate = activation.inputs[0]
        new = plugin_node("gated_activation", [gate, up], {"activation": kind}, outputs=1)
        replace(step.graph, product, [activation, product], [new], product.outputs, new.outputs)


def _is_projected(value: ir.Value | None) -> bool:
    """Whether a linear made it, or it is a part of what experts' linears made."""
    split = made_by(value, "Split", "")
    whole = None if split is None else split.inputs[0]
    return made_by(value, "linear") is not None or made_by(whole, "moe_linear") is not None


def _other_input(node: ir.Node, one: ir.Value) -> ir.Value | None:
    return node.inputs[1] if node.inputs[0] is one else node.inputs[0]
