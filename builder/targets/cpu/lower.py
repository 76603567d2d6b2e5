"""Lower a step graph to a step plan: one function for each operation, found by name.

A kernel's template and argument order are those of its header, plugins/<name>/cpu.h.
"""

from collections.abc import Callable

import onnx_ir as ir

from llmbuild.builder.graph.step_graph import HIDDEN, OUTPUT, StepGraph
from llmbuild.builder.models.config import DecoderConfig
from llmbuild.builder.targets.cpu.head_runs import head_runs
from llmbuild.builder.targets.cpu.lower_moe import LOWER_MOE
from llmbuild.builder.targets.cpu.lowering import CPP_TYPES, Lowering, cpp_grid
from llmbuild.builder.targets.cpu.plan import (
    Batch,
    Buffer,
    Expression,
    FirstToken,
    Layout,
    OwnRows,
    PackedWeight,
    Ranks,
    StepInput,
    StepPlan,
    View,
)
from llmbuild.errors import BuildError
from llmbuild.plugins.registry import DOMAIN
from llmbuild.runtime.manifest import KVLayout

CPP_ACTIVATIONS = {
    "silu": "Silu",
    "gelu": "Gelu",
    "gelu_tanh": "GeluTanh",
    "relu": "Relu",
    "relu2": "Relu2",
}


def _linear(lowering: Lowering, node: ir.Node) -> None:
    x = lowering.view(node.inputs[0])
    weight = lowering.weight(node.inputs[1])
    bias = lowering.optional_weight(node.inputs[2] if len(node.inputs) > 2 else None)
    rows, columns = weight.shape
    y = lowering.output(node.outputs[0], rows)
    template = (CPP_TYPES[weight.dtype], rows, columns, x.stride, y.stride)
    lowering.call("linear", template, x, weight, bias, y, y.buffer.count, out=[y])


def _quantised_linear(lowering: Lowering, node: ir.Node) -> None:
    x, weight = node.inputs[0], lowering.matrix(node.inputs[1])
    bias = lowering.optional_weight(node.inputs[4] if len(node.inputs) > 4 else None)
    rows, columns = weight.shape
    rounding = lowering.rounding(node)
    if rounding:
        view = lowering.int8_rows(x, rounding)
        y = lowering.output(node.outputs[0], rows)
        template = (cpp_grid(weight), rows, columns, rounding.group, y.stride)
        lowering.call("int8_linear", template, view, weight, bias, y, y.buffer.count, out=[y])
    else:
        view = lowering.view(x)
        y = lowering.output(node.outputs[0], rows)
        template = (cpp_grid(weight), rows, columns, view.stride, y.stride)
        arguments = (view, weight, bias, y, y.buffer.count)
        lowering.call("dequantised_linear", template, *arguments, out=[y])


def _split(lowering: Lowering, node: ir.Node) -> None:
    """No work: the parts are columns of the whole."""
    whole = lowering.view(node.inputs[0])
    column = whole.column
    for output in node.outputs:
        assert output.shape is not None
        width = output.shape[1]
        assert isinstance(width, int)
        lowering.views[output] = View(whole.buffer, column, width)
        column += width


def _rms_norm(lowering: Lowering, node: ir.Node) -> None:
    x = lowering.view(node.inputs[0])
    weight = lowering.weight(node.inputs[1])
    eps = node.attributes["eps"].as_float()
    rounding = lowering.common_rounding(node.outputs[0])
    if rounding and weight.shape[0] == x.width:
        y = lowering.int8_output(node.outputs[0], x.width, rounding)
        int8_template = (x.width, rounding.group, x.stride)
        arguments = (x, weight, eps, y, y.buffer.count)
        lowering.call_int8("rms_norm_int8", rounding, int8_template, *arguments, out=[y])
        return
    y = lowering.output(node.outputs[0], x.width)
    template = (x.width, weight.shape[0], x.stride, y.stride)
    lowering.call("rms_norm", template, x, weight, eps, y, y.buffer.count, out=[y])


def _add_rms_norm(lowering: Lowering, node: ir.Node) -> None:
    x, residual = (lowering.view(value) for value in node.inputs[:2])
    weight = lowering.weight(node.inputs[2])
    eps = node.attributes["eps"].as_float()
    total = lowering.output(node.outputs[0], x.width)
    rows = total.buffer.count
    strides = (x.width, x.stride, residual.stride, total.stride)
    rounding = lowering.common_rounding(node.outputs[1])
    if rounding:
        y = lowering.int8_output(node.outputs[1], x.width, rounding)
        arguments = (x, residual, weight, eps, total, y, rows)
        template = (*strides, rounding.group)
        lowering.call_int8("add_rms_norm_int8", rounding, template, *arguments, out=[total, y])
    else:
        y = lowering.output(node.outputs[1], x.width)
        arguments = (x, residual, weight, eps, total, y, rows)
        lowering.call("add_rms_norm", (*strides, y.stride), *arguments, out=[total, y])


def _rope_table(lowering: Lowering, node: ir.Node) -> None:
    frequencies = lowering.weight(node.inputs[1])
    half = frequencies.shape[0]
    table = lowering.output(node.outputs[0], 2 * half)
    scale = node.attributes["scale"].as_float()
    positions = StepInput("positions")
    rows = table.buffer.count
    lowering.call("rope_table", (half,), positions, frequencies, scale, table, rows, out=[table])


def _switched_rope_table(lowering: Lowering, node: ir.Node) -> None:
    frequencies = lowering.weight(node.inputs[3])
    half = frequencies.shape[1]
    table = lowering.output(node.outputs[0], 2 * half)
    length = node.attributes["switch_length"].as_int()
    scale = node.attributes["scale"].as_float()
    arguments = (Batch(), frequencies, length, scale, table)
    lowering.call("switched_rope_table", (half,), *arguments, out=[table])


def _dynamic_rope_table(lowering: Lowering, node: ir.Node) -> None:
    width = node.attributes["rotary_dim"].as_int()
    table = lowering.output(node.outputs[0], width)
    theta, factor, scale = (node.attributes[k].as_float() for k in ("theta", "factor", "scale"))
    length = node.attributes["original_length"].as_int()
    arguments = (Batch(), theta, factor, length, scale, table)
    lowering.call("dynamic_rope_table", (width // 2,), *arguments, out=[table])


def _rope_kv_write(lowering: Lowering, node: ir.Node) -> None:
    q, k, v = (lowering.view(value) for value in node.inputs[:3])
    table = None if node.inputs[3] is None else lowering.view(node.inputs[3])
    q_norm, k_norm = (lowering.optional_weight(value) for value in node.inputs[4:6])
    k_scale, v_scale = _channel_scales(lowering, node, 9)
    eps = node.attributes["eps"].as_float()
    turned = lowering.output(node.outputs[0], q.width)
    strides = (q.stride, k.stride, v.stride, turned.stride)
    turning = ("false" if q_norm is None else "true", 0 if table is None else table.width)
    for run in head_runs(lowering.config, lowering.kv, node.attributes["layer"].as_int()):
        lowering.call(
            "rope_kv_write",
            (*run.template, *strides, *turning),
            *(Batch(), run.queries(q), run.keys(k), run.keys(v), table, q_norm, k_norm, eps),
            *(*run.pools, run.queries(turned), run.channels(k_scale), run.channels(v_scale)),
            out=[turned],
        )


def _paged_attention(lowering: Lowering, node: ir.Node) -> None:
    q = lowering.view(node.inputs[0])
    sinks = lowering.optional_input(node, 6)
    k_scale, v_scale = _channel_scales(lowering, node, 7)
    scale = node.attributes["scale"].as_float()
    window = node.attributes["window"].as_int()
    soft_cap = node.attributes["soft_cap"].as_float()
    out = lowering.output(node.outputs[0], q.width)
    flags = ("true" if soft_cap else "false", "false" if sinks is None else "true")
    parts = lowering.attention_parts(node.outputs[0])
    for run in head_runs(lowering.config, lowering.kv, node.attributes["layer"].as_int()):
        lowering.call(
            "paged_attention",
            (*run.template, q.stride, out.stride, *flags),
            *(Batch(), run.queries(q), *run.pools, scale, window, run.queries(out), soft_cap),
            *(run.query_heads(sinks), parts, parts.buffer.count),
            *(run.channels(k_scale), run.channels(v_scale)),
            out=[out],
        )


def _channel_scales(
    lowering: Lowering, node: ir.Node, slot: int
) -> tuple[PackedWeight | None, PackedWeight | None]:
    """K's and V's, at inputs `slot` and the next. Pools without scales of their own need them."""
    index = node.attributes["layer"].as_int()
    layer = lowering.kv.layers[index]
    scales = lowering.optional_input(node, slot), lowering.optional_input(node, slot + 1)
    for kind, scale, dtypes in zip("kv", scales, (layer.k_dtypes, layer.v_dtypes), strict=True):
        if scale is None and "int8-static" in dtypes:
            raise BuildError(
                f"layer {index} keeps {kind.upper()} as int8-static and has no "
                f"layers.{index}.{kind}_scale; calibrate it, or choose another dtype"
            )
    return scales


def _layer_norm(lowering: Lowering, node: ir.Node) -> None:
    x = lowering.view(node.inputs[0])
    weight = lowering.weight(node.inputs[1])
    bias = lowering.optional_weight(node.inputs[2] if len(node.inputs) > 2 else None)
    y = lowering.output(node.outputs[0], x.width)
    eps = node.attributes["eps"].as_float()
    arguments = (x, weight, bias, eps, y, y.buffer.count)
    lowering.call("layer_norm", (x.width, x.stride, y.stride), *arguments, out=[y])


def _gated_activation(lowering: Lowering, node: ir.Node) -> None:
    gate, up = (lowering.view(value) for value in node.inputs)
    activation = CPP_ACTIVATIONS[node.attributes["activation"].as_string()]
    rounding = lowering.common_rounding(node.outputs[0])
    strides = (gate.width, gate.stride, up.stride)
    if rounding:
        y = lowering.int8_output(node.outputs[0], gate.width, rounding)
        template = (*strides, rounding.group, activation)
        arguments = (gate, up, y, y.buffer.count)
        lowering.call_int8("gated_activation_int8", rounding, template, *arguments, out=[y])
    else:
        y = lowering.output(node.outputs[0], gate.width)
        template = (*strides, y.stride, activation)
        lowering.call("gated_activation", template, gate, up, y, y.buffer.count, out=[y])


def _gather_rows(lowering: Lowering, node: ir.Node) -> None:
    """From a weight (embedding), or from an activation (the rows that need logits)."""
    source, index = node.inputs
    assert source is not None
    assert index is not None
    rows = StepInput(str(index.name))
    if source in lowering.views or source in lowering.expressions:
        view = lowering.view(source)
        assert view.stride == view.width, "rows are gathered from whole buffers"
        y = lowering.output(node.outputs[0], view.width)
        template: tuple[str | int, ...] = ("float", view.width, y.stride)
        arguments = (view, OwnRows(0, view.buffer.count), rows, y, y.buffer.count)
        lowering.call("gather_rows", template, *arguments, out=[y])
        return
    weight = lowering.weight(source)
    y = lowering.output(node.outputs[0], weight.shape[1])
    template = (CPP_TYPES[weight.dtype], weight.shape[1], y.stride)
    tiled = weight.layout is Layout.TILES_OF_16
    kernel = "gather_tiled_rows" if tiled else "gather_rows"
    own = _own_rows(lowering, index, weight)
    lowering.call(kernel, template, weight, own, rows, y, y.buffer.count, out=[y])


def _gather_quantised_rows(lowering: Lowering, node: ir.Node) -> None:
    table, index = lowering.matrix(node.inputs[0]), node.inputs[3]
    assert index is not None
    y = lowering.output(node.outputs[0], table.shape[1])
    template = (cpp_grid(table), table.shape[1], y.stride)
    own, rows = _own_rows(lowering, index, table), StepInput(str(index.name))
    lowering.call("gather_quantised_rows", template, table, own, rows, y, y.buffer.count, out=[y])


def _own_rows(lowering: Lowering, index: ir.Value, table: PackedWeight) -> OwnRows:
    """The token embedding's are the rank's own tokens; of any other table a rank has all. (The
    first token isn't a number in the code, so that ranks of one shape share one executable.)"""
    is_own = lowering.parallel.tp > 1 and index.name == "token_ids"
    return OwnRows(FirstToken() if is_own else 0, table.shape[0])


def _all_reduce(lowering: Lowering, node: ir.Node) -> None:
    """In place: nothing else reads a part of a sum."""
    x = lowering.view(node.inputs[0])
    assert x.stride == x.width, "what ranks sum up is a whole buffer"
    assert node.inputs[0] is not None
    assert len(node.inputs[0].uses()) == 1
    lowering.views[node.outputs[0]] = x
    lowering.call("all_reduce", (x.width,), Ranks(), x, x.buffer.count, out=[x])


def _elementwise(lowering: Lowering, node: ir.Node) -> None:
    operation = _ELEMENTWISE.get(node.op_type) or (
        f"{CPP_ACTIVATIONS[node.attributes['kind'].as_string()]}::apply"
    )
    operands = [_scalar(value) for value in node.inputs]
    parts = tuple(
        lowering.operand(value) if scalar is None else scalar
        for scalar, value in zip(operands, node.inputs, strict=True)
    )
    width = max(part.width for part in parts if not isinstance(part, float))
    lowering.expressions[node.outputs[0]] = Expression(operation, parts, width)
    if len(node.outputs[0].uses()) != 1:
        lowering.view(node.outputs[0])  # several readers: computed once, here


def _scalar(value: ir.Value | None) -> float | None:
    """The number that a Constant node makes, None for any other value."""
    node = value.producer() if value is not None else None
    if node is None or node.op_type != "Constant":
        return None
    (attribute,) = node.attributes.values()
    if attribute.type == ir.AttributeType.TENSOR:
        return float(attribute.as_tensor().numpy().reshape(()))
    return attribute.as_float()


def _constant(lowering: Lowering, node: ir.Node) -> None:
    """No work: whoever reads a constant reads it at compile time."""
    readers = {user.op_type for user, _ in node.outputs[0].uses()}
    unable = readers - {"Split", *_ELEMENTWISE}
    if unable:
        raise BuildError(f"the cpu target has no implementation of a Constant read by {unable}")


_ELEMENTWISE = {
    "Add": "Add",
    "Sub": "Sub",
    "Mul": "Mul",
    "Div": "Div",
    "Tanh": "Tanh::apply",
    "Sigmoid": "Sigmoid::apply",
}

_LOWER: dict[tuple[str, str], Callable[[Lowering, ir.Node], None]] = {
    ("", "Constant"): _constant,
    ("", "Split"): _split,
    (DOMAIN, "linear"): _linear,
    (DOMAIN, "quantised_linear"): _quantised_linear,
    (DOMAIN, "rms_norm"): _rms_norm,
    (DOMAIN, "add_rms_norm"): _add_rms_norm,
    (DOMAIN, "rope_table"): _rope_table,
    (DOMAIN, "rope_kv_write"): _rope_kv_write,
    (DOMAIN, "paged_attention"): _paged_attention,
    (DOMAIN, "gated_activation"): _gated_activation,
    (DOMAIN, "activation"): _elementwise,
    (DOMAIN, "layer_norm"): _layer_norm,
    (DOMAIN, "switched_rope_table"): _switched_rope_table,
    (DOMAIN, "dynamic_rope_table"): _dynamic_rope_table,
    **{(DOMAIN, operation): lower_node for operation, lower_node in LOWER_MOE.items()},
    (DOMAIN, "all_reduce"): _all_reduce,
    (DOMAIN, "gather_rows"): _gather_rows,
    (DOMAIN, "gather_quantised_rows"): _gather_quantised_rows,
    **{("", operation): _elementwise for operation in _ELEMENTWISE},
}


def lower(step: StepGraph, config: DecoderConfig, kv: KVLayout) -> StepPlan:
    """The CPU plan of a step graph that went through the passes. config, kv: those of the graph's
    shard.

    Raises BuildError, naming the node, for an operation that the target lacks, and naming the
    layer, for an int8-static pool without channel scales.
    """
    lowering = Lowering(step, config, kv)
    _receive(lowering)
    for node in step.graph:
        lower_node = _LOWER.get((node.domain, node.op_type))
        if lower_node is None:
            raise BuildError(
                f"the cpu target has no implementation of {node.domain or 'ai.onnx'}::"
                f"{node.op_type}, which makes {node.outputs[0].name!r}; it implements "
                f"{', '.join(sorted(name for _, name in _LOWER))}"
            )
        lower_node(lowering, node)
    logits = _result(lowering)
    return StepPlan(
        calls=tuple(lowering.calls),
        weights=tuple(lowering.weights.values()),
        logits=logits,
        kv=kv,
        hidden_size=config.hidden_size,
        parallel=lowering.parallel,
        stage=0 if step.shard is None else step.shard.stage,
    )


def _receive(lowering: Lowering) -> None:
    """What the stage before hands on, where there is one."""
    for value in lowering.step.graph.inputs:
        if value.name == HIDDEN:
            x = lowering.output(value, lowering.config.hidden_size)
            lowering.call("receive_rows", (x.width,), Ranks(), x, x.buffer.count, out=[x])


def _result(lowering: Lowering) -> Buffer | None:
    """The logits; or none, where the result goes to the next stage."""
    result = lowering.view(lowering.step.graph.outputs[0])
    if lowering.step.output == OUTPUT:
        return result.buffer
    assert result.stride == result.width, "what is handed on is a whole buffer"
    lowering.call("send_rows", (result.width,), Ranks(), result, result.buffer.count, out=[])
    return None
