"""Lower a step graph to a step plan: one function for each operation, found by name.

A kernel's template and argument order are those of its header, plugins/<name>/cpu.h.
"""

from collections.abc import Callable

import onnx_ir as ir

from llmbuild.builder.graph.step_graph import StepGraph
from llmbuild.builder.models.config import DecoderConfig
from llmbuild.builder.targets.cpu.plan import (
    Argument,
    Batch,
    Buffer,
    Call,
    Layout,
    PackedWeight,
    Pool,
    Rows,
    StepInput,
    StepPlan,
    View,
)
from llmbuild.errors import BuildError
from llmbuild.plugins.registry import DOMAIN

CPP_TYPES = {"fp32": "float", "bf16": "bf16"}
_CPP_ACTIVATIONS = {"silu": "Silu"}


class Lowering:
    """The state of one lowering: where each graph value lives, and the calls so far."""

    def __init__(
        self, step: StepGraph, config: DecoderConfig, kv_dtype: str, block_size: int
    ) -> None:
        self.step = step
        self.config = config
        self.kv_dtype = kv_dtype
        self.block_size = block_size
        self.views: dict[ir.Value, View] = {}
        self.weights: dict[str, PackedWeight] = {}
        self.calls: list[Call] = []

    def run(self) -> StepPlan:
        for node in self.step.graph:
            lower = _LOWER.get((node.domain, node.op_type))
            if lower is None:
                raise BuildError(
                    f"the cpu target has no implementation of {node.domain or 'ai.onnx'}::"
                    f"{node.op_type}, which makes {node.outputs[0].name!r}; it implements "
                    f"{', '.join(sorted(name for _, name in _LOWER))}"
                )
            lower(self, node)
        return StepPlan(
            calls=tuple(self.calls),
            weights=tuple(self.weights.values()),
            logits=self.views[self.step.graph.outputs[0]].buffer,
            kv_dtype=self.kv_dtype,
            kv_heads=self.config.num_kv_heads,
            head_dim=self.config.head_dim,
            block_size=self.block_size,
            num_layers=self.config.num_layers,
        )

    def call(
        self, kernel: str, template: tuple[str | int, ...], *arguments: Argument, out: list[View]
    ) -> None:
        writes = tuple(view.buffer for view in out)
        self.calls.append(Call(kernel, template, arguments, writes))

    def output(self, value: ir.Value, width: int) -> View:
        """A new buffer for a value of this many columns."""
        assert value.shape is not None
        buffer = Buffer(str(value.name), Rows(str(value.shape[0])), width)
        view = View(buffer, 0, width)
        self.views[value] = view
        return view

    def view(self, value: ir.Value | None) -> View:
        assert value is not None
        return self.views[value]

    def weight(self, value: ir.Value | None) -> PackedWeight:
        """A weight or constant, tiled when any linear reads it, else in rows."""
        assert value is not None
        name = str(value.name)
        if name not in self.weights:
            tiled = any(user.op_type == "linear" and slot == 1 for user, slot in value.uses())
            if name in self.step.constants:
                shape, dtype = self.step.constants[name].shape, "fp32"
            else:
                shape, dtype = self.step.weights[name].shape, self.step.weights[name].dtype
            layout = Layout.TILES_OF_16 if tiled else Layout.ROWS
            self.weights[name] = PackedWeight(name, shape, dtype, layout)
        return self.weights[name]

    def optional_weight(self, value: ir.Value | None) -> PackedWeight | None:
        return None if value is None else self.weight(value)

    @property
    def heads(self) -> tuple[str | int, ...]:
        """KV type, heads, KV heads, head_dim, block size: the head of the KV kernels' templates."""
        config = self.config
        kv_type = CPP_TYPES[self.kv_dtype]
        return (kv_type, config.num_heads, config.num_kv_heads, config.head_dim, self.block_size)


def _linear(lowering: Lowering, node: ir.Node) -> None:
    x = lowering.view(node.inputs[0])
    weight = lowering.weight(node.inputs[1])
    bias = lowering.optional_weight(node.inputs[2] if len(node.inputs) > 2 else None)
    rows, columns = weight.shape
    y = lowering.output(node.outputs[0], rows)
    template = (CPP_TYPES[weight.dtype], rows, columns, x.stride, y.stride)
    lowering.call("linear", template, x, weight, bias, y, y.buffer.rows, out=[y])


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
    y = lowering.output(node.outputs[0], x.width)
    template = (x.width, weight.shape[0], x.stride, y.stride)
    eps = node.attributes["eps"].as_float()
    lowering.call("rms_norm", template, x, weight, eps, y, y.buffer.rows, out=[y])


def _add_rms_norm(lowering: Lowering, node: ir.Node) -> None:
    x, residual = (lowering.view(value) for value in node.inputs[:2])
    weight = lowering.weight(node.inputs[2])
    total, y = (lowering.output(value, x.width) for value in node.outputs)
    template = (x.width, x.stride, residual.stride, total.stride, y.stride)
    eps = node.attributes["eps"].as_float()
    rows = y.buffer.rows
    lowering.call(
        "add_rms_norm", template, x, residual, weight, eps, total, y, rows, out=[total, y]
    )


def _rope_table(lowering: Lowering, node: ir.Node) -> None:
    frequencies = lowering.weight(node.inputs[1])
    half = frequencies.shape[0]
    table = lowering.output(node.outputs[0], 2 * half)
    scale = node.attributes["scale"].as_float()
    positions = StepInput("positions")
    rows = table.buffer.rows
    lowering.call("rope_table", (half,), positions, frequencies, scale, table, rows, out=[table])


def _rope_kv_write(lowering: Lowering, node: ir.Node) -> None:
    q, k, v, table = (lowering.view(value) for value in node.inputs[:4])
    q_norm, k_norm = (lowering.optional_weight(value) for value in node.inputs[4:6])
    layer = node.attributes["layer"].as_int()
    eps = node.attributes["eps"].as_float()
    turned = lowering.output(node.outputs[0], q.width)
    strides = (q.stride, k.stride, v.stride, turned.stride)
    lowering.call(
        "rope_kv_write",
        (*lowering.heads, *strides, "false" if q_norm is None else "true"),
        *(Batch(), q, k, v, table, q_norm, k_norm, eps, Pool(layer, "k"), Pool(layer, "v"), turned),
        out=[turned],
    )


def _paged_attention(lowering: Lowering, node: ir.Node) -> None:
    q = lowering.view(node.inputs[0])
    layer = node.attributes["layer"].as_int()
    scale = node.attributes["scale"].as_float()
    window = node.attributes["window"].as_int()
    out = lowering.output(node.outputs[0], q.width)
    lowering.call(
        "paged_attention",
        (*lowering.heads, q.stride, out.stride),
        *(Batch(), q, Pool(layer, "k"), Pool(layer, "v"), scale, window, out),
        out=[out],
    )


def _gated_activation(lowering: Lowering, node: ir.Node) -> None:
    gate, up = (lowering.view(value) for value in node.inputs)
    y = lowering.output(node.outputs[0], gate.width)
    activation = _CPP_ACTIVATIONS[node.attributes["activation"].as_string()]
    template = (gate.width, gate.stride, up.stride, y.stride, activation)
    lowering.call("gated_activation", template, gate, up, y, y.buffer.rows, out=[y])


def _gather_rows(lowering: Lowering, node: ir.Node) -> None:
    """From a weight (embedding), or from an activation (the rows that need logits)."""
    source, index = node.inputs
    assert source is not None
    assert index is not None
    rows = StepInput(str(index.name))
    if source in lowering.views:
        view = lowering.views[source]
        assert view.stride == view.width, "rows are gathered from whole buffers"
        y = lowering.output(node.outputs[0], view.width)
        template: tuple[str | int, ...] = ("float", view.width, y.stride)
        lowering.call("gather_rows", template, view, rows, y, y.buffer.rows, out=[y])
        return
    weight = lowering.weight(source)
    y = lowering.output(node.outputs[0], weight.shape[1])
    template = (CPP_TYPES[weight.dtype], weight.shape[1], y.stride)
    tiled = weight.layout is Layout.TILES_OF_16
    kernel = "gather_tiled_rows" if tiled else "gather_rows"
    lowering.call(kernel, template, weight, rows, y, y.buffer.rows, out=[y])


def _constant(lowering: Lowering, node: ir.Node) -> None:
    """Only the sizes of a split, which the split's outputs carry as shapes."""
    users = {user.op_type for user, _ in node.outputs[0].uses()}
    if users != {"Split"}:
        raise BuildError(f"the cpu target has no implementation of a Constant read by {users}")


_LOWER: dict[tuple[str, str], Callable[[Lowering, ir.Node], None]] = {
    ("", "Constant"): _constant,
    ("", "Split"): _split,
    (DOMAIN, "linear"): _linear,
    (DOMAIN, "rms_norm"): _rms_norm,
    (DOMAIN, "add_rms_norm"): _add_rms_norm,
    (DOMAIN, "rope_table"): _rope_table,
    (DOMAIN, "rope_kv_write"): _rope_kv_write,
    (DOMAIN, "paged_attention"): _paged_attention,
    (DOMAIN, "gated_activation"): _gated_activation,
    (DOMAIN, "gather_rows"): _gather_rows,
}


def lower(step: StepGraph, config: DecoderConfig, kv_dtype: str, block_size: int) -> StepPlan:
    """The CPU plan of a step graph that went through the passes.

    Raises BuildError, naming the node, for an operation that the target lacks.
    """
    return Lowering(step, config, kv_dtype, block_size).run()
