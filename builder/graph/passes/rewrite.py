"""What the passes share: questions about a graph's values, new constants, and the replacement of
nodes."""

from collections.abc import Mapping, Sequence

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from llmbuild.builder.graph.step_graph import StepGraph
from llmbuild.plugins.registry import DOMAIN

LINEARS = ("linear", "moe_linear")


def made_by(value: ir.Value | None, op_type: str, domain: str = DOMAIN) -> ir.Node | None:
    """The node that makes a value, if it is of this kind."""
    node = value.producer() if value is not None else None
    return node if node is not None and (node.domain, node.op_type) == (domain, op_type) else None


def nodes_of(graph: ir.Graph, op_type: str, domain: str = DOMAIN) -> list[ir.Node]:
    """The graph's nodes of one kind, in order; safe to rewrite while going through them."""
    return [node for node in graph if (node.domain, node.op_type) == (domain, op_type)]


def linears_of(graph: ir.Graph) -> list[ir.Node]:
    """Nodes that multiply by a matrix, or by one of each expert; it is their second input."""
    return [node for node in graph if node.domain == DOMAIN and node.op_type in LINEARS]


def users(value: ir.Value) -> list[ir.Node]:
    """The nodes that read a value, each once."""
    return list(dict.fromkeys(usage.node for usage in value.uses()))


def only_user(value: ir.Value) -> ir.Node | None:
    """The one node that reads a value, if there is exactly one and the graph doesn't return it."""
    found = users(value)
    return found[0] if len(found) == 1 and not value.is_graph_output() else None


def plugin_node(
    op_type: str,
    inputs: Sequence[ir.Value | None],
    attributes: Mapping[str, str | int | float],
    outputs: int,
) -> ir.Node:
    """A new node of our domain, not yet in a graph."""
    return ir.node(op_type, list(inputs), attributes, domain=DOMAIN, num_outputs=outputs)


def add_constant(step: StepGraph, name: str, values: NDArray[np.float32]) -> ir.Value:
    """A new initialiser that no checkpoint has."""
    step.constants[name] = np.ascontiguousarray(values, np.float32)
    kind = ir.TensorType(ir.DataType.FLOAT)
    value = ir.Value(name=name, shape=ir.Shape(values.shape), type=kind)
    step.graph.initializers[name] = value
    return value


def replace(
    graph: ir.Graph,
    at: ir.Node,
    old_nodes: Sequence[ir.Node],
    new_nodes: Sequence[ir.Node],
    old_values: Sequence[ir.Value],
    new_values: Sequence[ir.Value],
) -> None:
    """Put new nodes where `at` stands, hand the old values' users over, drop the old nodes."""
    for old, new in zip(old_values, new_values, strict=True):
        new.name, new.shape, new.type = old.name, old.shape, old.type
    ir.convenience.replace_nodes_and_values(graph, at, old_nodes, new_nodes, old_values, new_values)


def forward_value(graph: ir.Graph, node: ir.Node, value: ir.Value) -> None:
    """Drop a node with one output, whose users read `value` instead."""
    ir.convenience.replace_all_uses_with(node.outputs[0], value)
    graph.remove(node, safe=True)
