"""Drop what the export leaves behind that changes nothing: reshapes of a vector to a vector,
int64 copies of indices, and nodes that nothing reads."""

import onnx_ir as ir

from llmbuild.builder.graph.passes.rewrite import forward_value, nodes_of
from llmbuild.builder.graph.step_graph import StepGraph


def fold(step: StepGraph) -> None:
    graph = step.graph
    for node in nodes_of(graph, "Reshape", ""):
        value = node.inputs[0]
        if value is not None and value.shape is not None and _is_vector_to_vector(node):
            forward_value(graph, node, value)
    for node in nodes_of(graph, "Cast", ""):
        value = node.inputs[0]
        if value is not None and _widens_an_index(node, value):
            forward_value(graph, node, value)
    for node in reversed(list(graph)):
        if not any(output.uses() or output.is_graph_output() for output in node.outputs):
            graph.remove(node, safe=True)


def _is_vector_to_vector(node: ir.Node) -> bool:
    value, shape = node.inputs
    assert value is not None
    assert shape is not None
    constant = shape.producer()
    return (
        value.shape is not None
        and len(value.shape) == 1
        and constant is not None
        and constant.op_type == "Constant"
        and list(constant.attributes["value_ints"].as_ints()) == [-1]
    )


def _widens_an_index(node: ir.Node, value: ir.Value) -> bool:
    """Gather takes int32 as well as int64."""
    only_indices = all(
        (user.op_type, slot) == ("Gather", 1) for user, slot in node.outputs[0].uses()
    )
    to = node.attributes["to"].as_int()
    return only_indices and value.dtype == ir.DataType.INT32 and to == ir.DataType.INT64
