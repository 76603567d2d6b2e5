"""Linears that read the same value (Q, K, V; gate, up) become one, whose result is split."""

import onnx_ir as ir

from llmbuild.builder.graph.passes.rewrite import nodes_of, plugin_node, replace, users
from llmbuild.builder.graph.step_graph import StepGraph, Weight


def merge_linears(step: StepGraph) -> None:
    merged: set[ir.Node] = set()
    for first in nodes_of(step.graph, "linear"):
        if first in merged or first.inputs[0] is None:
            continue
        group = [node for node in users(first.inputs[0]) if _can_merge(step, first, node)]
        if len(group) > 1:
            merged.update(group)
            _merge(step, group)


def _can_merge(step: StepGraph, first: ir.Node, node: ir.Node) -> bool:
    """Same input, same dtype, bias on both or on neither, and weights that nobody else reads."""
    if (node.domain, node.op_type) != (first.domain, first.op_type):
        return False
    if node.inputs[0] is not first.inputs[0] or _has_bias(node) != _has_bias(first):
        return False
    weight, other = node.inputs[1], first.inputs[1]
    assert weight is not None
    assert other is not None
    own = [value for value in node.inputs[1:] if value is not None]
    return weight.dtype == other.dtype and all(
        value.name in step.weights and len(users(value)) == 1 for value in own
    )


def _has_bias(node: ir.Node) -> bool:
    return len(node.inputs) > 2 and node.inputs[2] is not None


def _merge(step: StepGraph, group: list[ir.Node]) -> None:
    graph, first = step.graph, group[0]
    sizes = [_rows(step, node) for node in group]
    count = 3 if _has_bias(first) else 2
    inputs = [first.inputs[0]]
    inputs += [
        _merged_weight(step, [node.inputs[slot] for node in group]) for slot in range(1, count)
    ]
    linear = plugin_node("linear", inputs, {}, outputs=1)
    total = linear.outputs[0]
    total.name = "+".join(str(node.outputs[0].name) for node in group)
    shape = first.outputs[0].shape
    assert shape is not None
    total.dtype, total.shape = ir.DataType.FLOAT, ir.Shape([shape[0], sum(sizes)])
    lengths = ir.node("Constant", [], {"value_ints": sizes})
    split = ir.node("Split", [total, lengths.outputs[0]], {"axis": 1}, num_outputs=len(group))
    old_values = [node.outputs[0] for node in group]
    replace(graph, first, group, [linear, lengths, split], old_values, split.outputs)


def _rows(step: StepGraph, node: ir.Node) -> int:
    weight = node.inputs[1]
    assert weight is not None
    assert weight.name is not None
    return step.weights[weight.name].shape[0]


def _merged_weight(step: StepGraph, parts: list[ir.Value | None]) -> ir.Value:
    """A new initialiser: the parts' rows, one after the other; the parts leave the graph."""
    names = [str(part.name) for part in parts if part is not None]
    weights = [step.weights.pop(name) for name in names]
    for name in names:
        del step.graph.initializers[name]
    rows = sum(weight.shape[0] for weight in weights)
    sources = tuple(source for weight in weights for source in weight.sources)
    weight = Weight(sources, (rows, *weights[0].shape[1:]), weights[0].dtype)
    dtype = parts[0].dtype if parts[0] is not None else None
    value = ir.Value(
        name="+".join(sources),
        shape=ir.Shape(weight.shape),
        type=ir.TensorType(dtype or ir.DataType.FLOAT),
    )
    step.graph.initializers[str(value.name)] = value
    step.weights[str(value.name)] = weight
    return value
