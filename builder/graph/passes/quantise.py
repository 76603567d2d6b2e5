"""Linears and tables whose weights the quantisation plan puts on a grid read codes instead."""

import onnx_ir as ir

from llmbuild.builder.graph.passes.rewrite import nodes_of, plugin_node, replace
from llmbuild.builder.graph.step_graph import CODES, MINIMA, SCALES, StepGraph, Weight
from llmbuild.quant.grid import WeightGrid
from llmbuild.quant.plan import QuantPlan

_TYPES = {"uint8": ir.DataType.UINT8, "fp16": ir.DataType.FLOAT16}


def quantise(step: StepGraph, plan: QuantPlan) -> None:
    """Put the plan's weights on their grids; every other stays as it is."""
    matrices: dict[str, list[ir.Value | None]] = {}  # by canonical name: codes, scales, minima
    for node in nodes_of(step.graph, "linear"):
        parts = _parts(step, plan, node.inputs[1], matrices)
        if parts is not None:
            bias = node.inputs[2] if len(node.inputs) > 2 else None
            group = plan.activation_groups.get(_name(node.inputs[1]), 0)
            attributes = {"activation_group": group}
            _replace(step, node, "quantised_linear", [node.inputs[0], *parts, bias], attributes)
    for node in nodes_of(step.graph, "gather_rows"):
        parts = _parts(step, plan, node.inputs[0], matrices)
        if parts is not None:
            _replace(step, node, "gather_quantised_rows", [*parts, node.inputs[1]], {})
    for name in matrices:
        del step.weights[name]
        del step.graph.initializers[name]


def _parts(
    step: StepGraph,
    plan: QuantPlan,
    weight: ir.Value | None,
    matrices: dict[str, list[ir.Value | None]],
) -> list[ir.Value | None] | None:
    """Codes, scales and minima of a weight that the plan quantises, made when first asked for."""
    name = _name(weight)
    grid = plan.weights.get(name)
    if grid is None:
        return None
    if name not in matrices:
        matrices[name] = _add_parts(step, name, grid)
    return matrices[name]


def _name(weight: ir.Value | None) -> str:
    return "" if weight is None else str(weight.name)


def _add_parts(step: StepGraph, name: str, grid: WeightGrid) -> list[ir.Value | None]:
    sources, (rows, columns) = step.weights[name].sources, step.weights[name].shape
    groups = columns // grid.columns_of(columns)
    parts: list[ir.Value | None] = []
    for part, width, dtype in (
        (CODES, columns, "uint8"),
        (SCALES, groups, "fp16"),
        (MINIMA, groups, "fp16"),
    ):
        if part == MINIMA and grid.symmetric:
            parts.append(None)
            continue
        weight = Weight(sources, (rows, width), dtype, grid, part)
        kind = ir.TensorType(_TYPES[dtype])
        value = ir.Value(name=f"{name}.{part}", shape=ir.Shape(weight.shape), type=kind)
        step.graph.initializers[f"{name}.{part}"] = value
        step.weights[f"{name}.{part}"] = weight
        parts.append(value)
    return parts


def _replace(
    step: StepGraph,
    node: ir.Node,
    op_type: str,
    inputs: list[ir.Value | None],
    attributes: dict[str, int],
) -> None:
    grid = next(
        weight.grid
        for value in inputs
        if value is not None and (weight := step.weights.get(str(value.name))) and weight.grid
    )
    zero = grid.zero if grid.symmetric else 0
    new = plugin_node(op_type, inputs, {"zero": zero, **attributes}, outputs=1)
    replace(step.graph, node, [node], [new], node.outputs, new.outputs)
