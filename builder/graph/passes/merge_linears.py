"""Linears that read the same value (Q, K, V; gate, up) become one, whose result is split; those
that are quantised, where they have one grid and round what they read alike."""

from dataclasses import replace as replace_fields

import onnx_ir as ir

from llmbuild.builder.graph.passes.quantise import ACTIVATION_SCALES_SLOT
from llmbuild.builder.graph.passes.rewrite import nodes_of, plugin_node, replace, users
from llmbuild.builder.graph.step_graph import StepGraph, Weight

_KINDS = ("linear", "quantised_linear")
_SHARED_SLOTS = (0, ACTIVATION_SCALES_SLOT)  # inputs that linears which merge have in common


def merge_linears(step: StepGraph) -> None:
    merged: set[ir.Node] = set()
    for first in (node for kind in _KINDS for node in nodes_of(step.graph, kind)):
        if first in merged or first.inputs[0] is None:
            continue
        group = [node for node in users(first.inputs[0]) if _can_merge(step, first, node)]
        if len(group) > 1:
            merged.update(group)
            _merge(step, group)


def _can_merge(step: StepGraph, first: ir.Node, node: ir.Node) -> bool:
    """Same input, rounded alike, weights of the same kinds (the bias, too), which nobody else
    reads. Equal static scales of an input are one value, as `quantise` places them."""
    if (node.domain, node.op_type) != (first.domain, first.op_type):
        return False
    if any(_input(node, slot) is not _input(first, slot) for slot in _SHARED_SLOTS):
        return False
    if _attributes(node) != _attributes(first):
        return False
    own, others = _weights(step, node), _weights(step, first)
    if own is None or others is None or own.keys() != others.keys():
        return False
    return all(
        (own[slot].dtype, own[slot].grid) == (others[slot].dtype, others[slot].grid) for slot in own
    )


def _input(node: ir.Node, slot: int) -> ir.Value | None:
    return node.inputs[slot] if slot < len(node.inputs) else None


def _weights(step: StepGraph, node: ir.Node) -> dict[int, Weight] | None:
    """A linear's weights by the input that they are; None if it shares one."""
    values = {
        slot: value
        for slot, value in enumerate(node.inputs)
        if slot not in _SHARED_SLOTS and value is not None
    }
    if any(value.name not in step.weights or len(users(value)) > 1 for value in values.values()):
        return None
    return {slot: step.weights[str(value.name)] for slot, value in values.items()}


def _merge(step: StepGraph, group: list[ir.Node]) -> None:
    graph, first = step.graph, group[0]
    sizes = [_rows(step, node) for node in group]
    inputs = [
        _merged_weight(step, [node.inputs[slot] for node in group])
        if slot not in _SHARED_SLOTS and value is not None
        else value
        for slot, value in enumerate(first.inputs)
    ]
    linear = plugin_node(first.op_type, inputs, _attributes(first), outputs=1)
    total = linear.outputs[0]
    total.name = "+".join(str(node.outputs[0].name) for node in group)
    shape = first.outputs[0].shape
    assert shape is not None
    total.dtype, total.shape = ir.DataType.FLOAT, ir.Shape([shape[0], sum(sizes)])
    lengths = ir.node("Constant", [], {"value_ints": sizes})
    split = ir.node("Split", [total, lengths.outputs[0]], {"axis": 1}, num_outputs=len(group))
    old_values = [node.outputs[0] for node in group]
    replace(graph, first, group, [linear, lengths, split], old_values, split.outputs)


def _attributes(node: ir.Node) -> dict[str, int]:
    return {name: attribute.as_int() for name, attribute in node.attributes.items()}


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
    weight = replace_fields(weights[0], sources=sources, shape=(rows, *weights[0].shape[1:]))
    dtype = parts[0].dtype if parts[0] is not None else None
    value = ir.Value(
        name=".".join(filter(None, ("+".join(sources), weight.part))),
        shape=ir.Shape(weight.shape),
        type=ir.TensorType(dtype or ir.DataType.FLOAT),
    )
    step.graph.initializers[str(value.name)] = value
    step.weights[str(value.name)] = weight
    return value
