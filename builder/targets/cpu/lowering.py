"""Where each graph value lives while a step graph is lowered to the cpu target, and the calls."""

from dataclasses import dataclass
from typing import Any

import onnx_ir as ir

from llmbuild.builder.graph.passes.quantise import ACTIVATION_SCALES_SLOT
from llmbuild.builder.graph.step_graph import CODES, StepGraph
from llmbuild.builder.models.config import DecoderConfig
from llmbuild.builder.targets.cpu.plan import (
    Argument,
    Buffer,
    Call,
    Expression,
    Layout,
    PackedWeight,
    Rows,
    View,
)
from llmbuild.quant.grid import GROUP_UNIT
from llmbuild.runtime.manifest import ALONE, KVLayout

CPP_TYPES = {"fp32": "float", "bf16": "bf16"}


def int8_row_bytes(width: int, group: int) -> int:
    """Bytes of a row of int8 activations, as Int8Row of plugins/common/int8_rows.h lays it out."""
    codes_and_scales = width + 4 * (width // group)
    return -(-(codes_and_scales + 2 * 4 * (width // GROUP_UNIT)) // 64) * 64


def cpp_grid(weight: PackedWeight) -> str:
    """The kernels' type of a quantised matrix's grid."""
    grid = weight.grid
    assert grid is not None
    kind = "false" if grid.symmetric else "true, true" if grid.zero_points else "true"
    return f"Grid<{grid.bits}, {grid.columns_of(weight.shape[-1])}, {kind}>"


ATTENTION_RANGE_KEYS = 128  # kRangeKeys of plugins/paged_attention/key_range.h
_TILED = {("linear", 1), ("moe_linear", 1)}  # (operation, input)
_ROUNDING = {("quantised_linear", 0), ("quantised_moe_linear", 0)}


@dataclass(frozen=True)
class Rounding:
    """How linears round what they read to int8: the columns of a group, and the groups' scales, the
    same for every row; without, each row has its own."""

    group: int
    scales: PackedWeight | None

    @property
    def name(self) -> str:
        """Of the rows that are rounded so, beside their value's."""
        return f"int8.{self.group}" + (f".{self.scales.name}" if self.scales else "")


class Lowering:
    """What the functions of lower.py share while they go through a step graph, node by node."""

    def __init__(self, step: StepGraph, config: DecoderConfig, kv: KVLayout) -> None:
        self.step = step
        self.config = config
        self.kv = kv
        self.parallel = ALONE if step.shard is None else step.shard.parallel
        self.views: dict[ir.Value, View] = {}
        self.expressions: dict[ir.Value, Expression] = {}  # not computed until a kernel needs them
        self.int8_views: dict[tuple[ir.Value, Rounding], View] = {}  # for quantised linears
        self.weights: dict[str, PackedWeight] = {}
        self.calls: list[Call] = []

    def call(
        self, kernel: str, template: tuple[str | int, ...], *arguments: Argument, out: list[View]
    ) -> None:
        writes = tuple(view.buffer for view in out)
        self.calls.append(Call(kernel, template, arguments, writes))

    def call_int8(
        self,
        kernel: str,
        rounding: Rounding,
        template: tuple[str | int, ...],
        *arguments: Argument,
        out: list[View],
    ) -> None:
        """A call that writes int8 rows; what it needs for static scales comes last."""
        if rounding.scales is None:
            self.call(kernel, template, *arguments, out=out)
        else:
            self.call(kernel, (*template, "true"), *arguments, rounding.scales, out=out)

    def output(self, value: ir.Value, width: int, **kind: Any) -> View:
        """A new buffer for a value of this many columns; kind: further fields of Buffer."""
        rows, rows_each = _rows(value)
        buffer = Buffer(str(value.name), rows, width, rows_each, **kind)
        view = View(buffer, 0, width)
        self.views[value] = view
        return view

    def scratch(self, value: ir.Value, purpose: str, rows: Rows, width: int, **kind: Any) -> View:
        """A buffer that only the calls of one node share."""
        return View(Buffer(f"{value.name}.{purpose}", rows, width, **kind), 0, width)

    def view(self, value: ir.Value | None) -> View:
        """Where a value lies, computing it now if it is an expression."""
        assert value is not None
        if value in self.expressions:
            self._compute(value, self.expressions.pop(value))
        return self.views[value]

    def operand(self, value: ir.Value | None) -> Expression | View:
        """A value as part of an expression: inlined where nothing else reads it."""
        assert value is not None
        if value in self.expressions and len(value.uses()) == 1:
            return self.expressions.pop(value)
        return self.view(value)

    def _compute(self, value: ir.Value, expression: Expression) -> None:
        """In place of an operand that nothing reads afterwards, where there is one: so logits are
        never held twice."""
        y = self._dying_operand(expression, expression.width)
        if y is None:
            y = self.output(value, expression.width)
        self.views[value] = y
        rows = y.buffer.count
        self.call("elementwise", (expression.width, y.stride), y, rows, expression, out=[y])

    def _dying_operand(self, expression: Expression, width: int) -> View | None:
        """A whole buffer of this width that only this expression, or a part of it, reads."""
        for operand in expression.operands:
            if isinstance(operand, Expression):
                found = self._dying_operand(operand, width)
                if found is not None:
                    return found
            elif isinstance(operand, View) and operand.width == operand.stride == width:
                owners = [v for v, view in self.views.items() if view.buffer == operand.buffer]
                if len(owners) == 1 and len(owners[0].uses()) == 1:
                    return operand
        return None

    def weight(self, value: ir.Value | None) -> PackedWeight:
        """A weight or constant, tiled when any linear reads it, else in rows."""
        assert value is not None
        name = str(value.name)
        if name not in self.weights:
            tiled = any((user.op_type, slot) in _TILED for user, slot in value.uses())
            if name in self.step.constants:
                shape, dtype = self.step.constants[name].shape, "fp32"
            else:
                shape, dtype = self.step.weights[name].shape, self.step.weights[name].dtype
            layout = Layout.TILES_OF_16 if tiled else Layout.ROWS
            self.weights[name] = PackedWeight(name, shape, dtype, layout)
        return self.weights[name]

    def matrix(self, codes: ir.Value | None) -> PackedWeight:
        """The quantised matrix whose codes a node reads."""
        assert codes is not None
        weight = self.step.weights[str(codes.name)]
        name = str(codes.name).removesuffix(f".{CODES}")
        if name not in self.weights:
            assert weight.grid is not None
            dtype = f"int{weight.grid.bits}"
            packed = PackedWeight(name, weight.shape, dtype, Layout.CODES, weight.grid)
            self.weights[name] = packed
        return self.weights[name]

    def rounding(self, node: ir.Node) -> Rounding | None:
        """How a quantised linear rounds its activations; None if it reads them as they are."""
        group = node.attributes["activation_group"].as_int()
        if not group:
            return None
        return Rounding(group, self.optional_input(node, ACTIVATION_SCALES_SLOT))

    def common_rounding(self, value: ir.Value) -> Rounding | None:
        """That of all who read a value, if those are linears that round it alike and it isn't the
        graph's result."""
        roundings = {
            self.rounding(user) if (user.op_type, slot) in _ROUNDING else None
            for user, slot in value.uses()
        }
        return roundings.pop() if len(roundings) == 1 and not value.is_graph_output() else None

    def int8_output(self, value: ir.Value, width: int, rounding: Rounding) -> View:
        """A new buffer for a value of this many columns as int8 rows."""
        items = int8_row_bytes(width, rounding.group) // 4
        name = f"{value.name}.{rounding.name}"
        rows, rows_each = _rows(value)
        buffer = Buffer(name, rows, items, rows_each, dtype="int8_rows")
        self.int8_views[value, rounding] = View(buffer, 0, items)
        return self.int8_views[value, rounding]

    def int8_rows(self, value: ir.Value | None, rounding: Rounding) -> View:
        """Where a value lies as int8 rows, rounded now unless the kernel that made it did so."""
        assert value is not None
        if (value, rounding) not in self.int8_views:
            x = self.view(value)
            rows = self.int8_output(value, x.width, rounding)
            template = (x.width, rounding.group, x.stride)
            arguments = (x, rows, x.buffer.count)
            self.call_int8("quantise_rows", rounding, template, *arguments, out=[rows])
        return self.int8_views[value, rounding]

    def optional_weight(self, value: ir.Value | None) -> PackedWeight | None:
        return None if value is None else self.weight(value)

    def optional_input(self, node: ir.Node, slot: int) -> PackedWeight | None:
        """A weight that a node may read, or not."""
        return self.optional_weight(node.inputs[slot] if slot < len(node.inputs) else None)

    def attention_parts(self, value: ir.Value) -> View:
        """Memory for attention that is cut between threads: every head of the longest sequence has
        room for its result over each range of keys, head_dim (in whole vectors of 16) and 2 floats.
        """
        range_floats = self.config.num_heads * (-(-self.config.head_dim // 16) * 16 + 2)
        key_floats = -(-range_floats // ATTENTION_RANGE_KEYS)
        return self.scratch(value, "parts", Rows.LONGEST, 1, rows_each=key_floats)


def _rows(value: ir.Value) -> tuple[Rows, int]:
    """What the number of a value's rows goes with, and how many of them."""
    assert value.shape is not None
    *each, rows = str(value.shape[0]).split(" * ")
    return Rows(rows), int(each[0]) if each else 1
