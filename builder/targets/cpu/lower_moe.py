"""Lowers a mixture's operations; templates and argument orders are those of plugins/moe/cpu.h."""

import onnx_ir as ir

from llmbuild.builder.targets.cpu.lowering import CPP_TYPES, Lowering, cpp_grid
from llmbuild.builder.targets.cpu.plan import Buffer, Rows, View

_CPP_SCORINGS = {"softmax": "Softmax", "top_k_softmax": "TopKSoftmax"}


def _route(lowering: Lowering, node: ir.Node) -> None:
    logits = lowering.view(node.inputs[0])
    top_k = node.attributes["top_k"].as_int()
    experts = lowering.output(node.outputs[0], top_k, dtype="int32")
    weights = lowering.output(node.outputs[1], top_k)
    scoring = _CPP_SCORINGS[node.attributes["scoring"].as_string()]
    normalise = "true" if node.attributes["normalise"].as_int() else "false"
    template = (logits.width, top_k, scoring, normalise, logits.stride)
    arguments = (logits, experts, weights, weights.buffer.count)
    lowering.call("moe_route", template, *arguments, out=[experts, weights])


def _sort(lowering: Lowering, node: ir.Node) -> None:
    experts, count = lowering.view(node.inputs[0]), node.attributes["num_experts"].as_int()
    starts_buffer = Buffer(str(node.outputs[0].name), Rows.ONE, count + 1, dtype="int32")
    starts = lowering.views[node.outputs[0]] = View(starts_buffer, 0, count + 1)
    rows_of = lowering.output(node.outputs[1], 1, dtype="int32")
    slot_of = lowering.output(node.outputs[2], experts.width, dtype="int32")
    arguments = (experts, starts, rows_of, slot_of, experts.buffer.count)
    template = (count, experts.width)
    lowering.call("moe_sort", template, *arguments, out=[starts, rows_of, slot_of])


def _gather(lowering: Lowering, node: ir.Node) -> None:
    """Of tokens that are rounded once, where the slots' linear reads int8."""
    rows_of = lowering.view(node.inputs[1])
    rounding = lowering.common_rounding(node.outputs[0])
    if rounding:
        width = lowering.view(node.inputs[0]).width
        x = lowering.int8_rows(node.inputs[0], rounding)
        slots = lowering.int8_output(node.outputs[0], width, rounding)
    else:
        x = lowering.view(node.inputs[0])
        slots = lowering.output(node.outputs[0], x.width)
    arguments = (x, rows_of, slots, slots.buffer.count)
    lowering.call("moe_gather", (x.width, x.stride), *arguments, out=[slots])


def _linear(lowering: Lowering, node: ir.Node) -> None:
    x, starts = lowering.view(node.inputs[0]), lowering.view(node.inputs[2])
    weight = lowering.weight(node.inputs[1])
    experts, rows, columns = weight.shape
    y = lowering.output(node.outputs[0], rows)
    template = (CPP_TYPES[weight.dtype], experts, rows, columns)
    lowering.call("moe_linear", template, _whole(x), weight, starts, y, out=[y])


def _quantised_linear(lowering: Lowering, node: ir.Node) -> None:
    weight, starts = lowering.matrix(node.inputs[1]), lowering.view(node.inputs[4])
    experts, rows, columns = weight.shape
    rounding = lowering.rounding(node)
    template: tuple[str | int, ...] = (cpp_grid(weight), experts, rows, columns)
    if rounding:
        x = lowering.int8_rows(node.inputs[0], rounding)
        y = lowering.output(node.outputs[0], rows)
        template = (*template, rounding.group)
        lowering.call("moe_int8_linear", template, x, weight, starts, y, out=[y])
    else:
        x = _whole(lowering.view(node.inputs[0]))
        y = lowering.output(node.outputs[0], rows)
        lowering.call("moe_dequantised_linear", template, x, weight, starts, y, out=[y])


def _combine(lowering: Lowering, node: ir.Node) -> None:
    outputs, slot_of, weights = map(lowering.view, node.inputs)
    y = lowering.output(node.outputs[0], outputs.width)
    template = (outputs.width, slot_of.width, y.stride)
    arguments = (_whole(outputs), slot_of, weights, y, y.buffer.count)
    lowering.call("moe_combine", template, *arguments, out=[y])


def _whole(x: View) -> View:
    assert x.stride == x.width, "slots are whole buffers"
    return x


LOWER_MOE = {
    "moe_route": _route,
    "moe_sort": _sort,
    "moe_gather": _gather,
    "moe_linear": _linear,
    "quantised_moe_linear": _quantised_linear,
    "moe_combine": _combine,
}
