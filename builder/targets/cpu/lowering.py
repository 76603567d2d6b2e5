"""Where each graph value lives while a step graph is lowered to the cpu target, and the calls."""

from typing import Any

import onnx_ir as ir

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

CPP_TYPES = {"fp32": "float", "bf16": "bf16"}


def int8_row_bytes(width: int, group: int) -> int:
    """Bytes of a row of int8 activations, as Int8Row of plugins/common/int8_rows.h lays it out."""
    codes_and_scales = width + 4 * (width // group)
    return -(-(codes_and_scales + 2 * 4 * (width // GROUP_UNIT)) // 64) * 64


def cpp_grid(weight: PackedWeight) -> str:
    """The kernels' type of a quantised matrix's grid."""
    grid = weight.grid
    assert grid is not None
    asymmetric = "false" if grid.symmetric else "true"
    return f"Grid<{grid.bits}, {grid.columns_of(weight.shape[1])}, {asymmetric}>"


KV_CPP_TYPES = CPP_TYPES | {"int8": "int8_t"}
ATTENTION_RANGE_KEYS = 128  # kRangeKeys of plugins/paged_attention/key_range.h
_TILED = {("linear", 1), ("moe_experts", 3), ("moe_experts", 4)}  # (operation, input)


class Lowering:
    """What the functions of lower.py share while they go through a step graph, node by node."""

    def __init__(
        self, step: StepGraph, config: DecoderConfig, kv_dtype: str, block_size: int
    ) -> None:
        self.step = step
        self.config = config
        self.kv_dtype = kv_dtype
        self.block_size = block_size
        self.views: dict[ir.Value, View] = {}
        self.expressions: dict[ir.Value, Expression] = {}  # not computed until a kernel needs them
        # Values rounded to int8 for quantised linears, in groups of so many columns.
        self.int8_views: dict[tuple[ir.Value, int], View] = {}
        self.weights: dict[str, PackedWeight] = {}
        self.calls: list[Call] = []

    def call(
        self, kernel: str, template: tuple[str | int, ...], *arguments: Argument, out: list[View]
    ) -> None:
        writes = tuple(view.buffer for view in out)
        self.calls.append(Call(kernel, template, arguments, writes))

    def output(self, value: ir.Value, width: int, **kind: Any) -> View:
        """A new buffer for a value of this many columns; kind: further fields of Buffer."""
        assert value.shape is not None
        buffer = Buffer(str(value.name), Rows(str(value.shape[0])), width, **kind)
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

    def int8_group(self, value: ir.Value) -> int:
        """The columns of a group, if linears that round it to int8 alike are all that reads a value
        and it isn't the graph's result; else 0."""
        groups = {
            user.attributes["activation_group"].as_int()
            if (user.op_type, slot) == ("quantised_linear", 0)
            else 0
            for user, slot in value.uses()
        }
        return groups.pop() if len(groups) == 1 and not value.is_graph_output() else 0

    def int8_output(self, value: ir.Value, width: int, group: int) -> View:
        """A new buffer for a value of this many columns as int8 rows."""
        assert value.shape is not None
        items = int8_row_bytes(width, group) // 4
        name = f"{value.name}.int8.{group}"
        buffer = Buffer(name, Rows(str(value.shape[0])), items, dtype="int8_rows")
        self.int8_views[value, group] = View(buffer, 0, items)
        return self.int8_views[value, group]

    def int8_rows(self, value: ir.Value | None, group: int) -> View:
        """Where a value lies as int8 rows, rounded now unless the kernel that made it did so."""
        assert value is not None
        if (value, group) not in self.int8_views:
            x = self.view(value)
            rows = self.int8_output(value, x.width, group)
            template = (x.width, group, x.stride)
            self.call("quantise_rows", template, x, rows, x.buffer.count, out=[rows])
        return self.int8_views[value, group]

    def optional_weight(self, value: ir.Value | None) -> PackedWeight | None:
        return None if value is None else self.weight(value)

    def attention_parts(self, value: ir.Value) -> View:
        """Memory for attention that is cut between threads: every head of the longest sequence has
        room for its result over each range of keys, head_dim (in whole vectors of 16) and 2 floats.
        """
        range_floats = self.config.num_heads * (-(-self.config.head_dim // 16) * 16 + 2)
        key_floats = -(-range_floats // ATTENTION_RANGE_KEYS)
        return self.scratch(value, "parts", Rows.LONGEST, 1, rows_each=key_floats)

    @property
    def heads(self) -> tuple[str | int, ...]:
        """KV type, heads, KV heads, head_dim, block size: the head of the KV kernels' templates."""
        config = self.config
        kv_type = KV_CPP_TYPES[self.kv_dtype]
        return (kv_type, config.num_heads, config.num_kv_heads, config.head_dim, self.block_size)
