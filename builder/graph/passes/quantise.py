"""Linears, experts' too, and tables whose weights the quantisation plan puts on a grid read codes
instead."""

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from llmbuild.builder.graph.passes.rewrite import (
    add_constant,
    linears_of,
    nodes_of,
    plugin_node,
    replace,
)
from llmbuild.builder.graph.step_graph import (
    CODES,
    MINIMA,
    SCALES,
    ZEROS,
    StepGraph,
    Weight,
)
from llmbuild.errors import BuildError
from llmbuild.quant.grid import WeightGrid
from llmbuild.quant.plan import QuantPlan

_TYPES = {
    "uint8": ir.DataType.UINT8,
    "fp8": ir.DataType.FLOAT8E4M3FN,
    "fp16": ir.DataType.FLOAT16,
    "fp32": ir.DataType.FLOAT,
}
Parts = dict[str, ir.Value]  # of one matrix, those that its grid has
Scales = dict[bytes, ir.Value]  # static ones of activations, by content
ACTIVATION_SCALES_SLOT = 6  # of quantised_linear and quantised_moe_linear


def quantise(step: StepGraph, plan: QuantPlan) -> None:
    """Put the plan's weights on their grids; every other stays as it is.

    Raises BuildError for static scales of activations that aren't positive numbers or too few.
    """
    matrices: dict[str, Parts] = {}  # by canonical name
    scales: Scales = {}
    for node in linears_of(step.graph):
        parts = _parts(step, plan, node.inputs[1], matrices)
        if parts is not None:
            last = node.inputs[2] if len(node.inputs) > 2 else None  # the bias, or experts' slots
            group = plan.activation_groups.get(_name(node.inputs[1]), 0)
            inputs = [node.inputs[0], *_operands(parts, last)]
            static = _activation_scales(step, plan, node, scales)
            if static is not None:
                inputs += [None] * (ACTIVATION_SCALES_SLOT - len(inputs)) + [static]
            _replace(step, node, f"quantised_{node.op_type}", inputs, {"activation_group": group})
    for node in nodes_of(step.graph, "gather_rows"):
        parts = _parts(step, plan, node.inputs[0], matrices)
        if parts is not None:
            inputs = _operands(parts, node.inputs[1])
            first = {"first": node.attributes["first"].as_int()}
            _replace(step, node, "gather_quantised_rows", inputs, first)
    for name in matrices:
        del step.weights[name]
        del step.graph.initializers[name]


def _parts(
    step: StepGraph,
    plan: QuantPlan,
    weight: ir.Value | None,
    matrices: dict[str, Parts],
) -> Parts | None:
    """The parts of a weight that the plan quantises, made when first asked for."""
    name = _name(weight)
    grid = plan.weights.get(name)
    if grid is None:
        return None
    if name not in matrices:
        matrices[name] = _add_parts(step, name, grid)
    return matrices[name]


def _activation_scales(
    step: StepGraph, plan: QuantPlan, node: ir.Node, placed: Scales
) -> ir.Value | None:
    """The static scales of a linear's activations, one constant for all linears that have the
    same."""
    name = _name(node.inputs[1])
    if name not in plan.activation_scales:
        return None
    scales = plan.activation_scales[name]
    _check_scales(name, scales, step.weights[name].shape[-1], plan.activation_groups[name])
    key = scales.tobytes()
    if key not in placed:
        placed[key] = add_constant(step, f"{name}.activation_scales", scales)
    return placed[key]


def _check_scales(name: str, scales: NDArray[np.float32], columns: int, group: int) -> None:
    for index in range(columns // group):
        scale = scales[index] if index < len(scales) else np.float32(0)
        with np.errstate(divide="ignore", over="ignore"):
            is_sound = scale > 0 and np.isfinite(scale) and np.isfinite(1 / scale)
        if not is_sound:
            given = f"is {scale}" if index < len(scales) else "is missing"
            raise BuildError(
                f"{name}: the static scale of its activations' columns {index * group} to "
                f"{(index + 1) * group - 1} (group {index}) {given}, and must be a number above "
                "zero; calibrate with other tokens, or leave this tensor's activations dynamic"
            )
    assert scales.shape == (columns // group,), f"{name}: {scales.shape} static scales"


def _operands(parts: Parts, last: ir.Value | None) -> list[ir.Value | None]:
    """A matrix as inputs of an operation, with the operation's last one among them."""
    zeros = [parts[ZEROS]] if ZEROS in parts else []
    return [parts[CODES], parts[SCALES], parts.get(MINIMA), last, *zeros]


def _name(weight: ir.Value | None) -> str:
    return "" if weight is None else str(weight.name)


def _add_parts(step: StepGraph, name: str, grid: WeightGrid) -> Parts:
    sources, (*rows, columns) = step.weights[name].sources, step.weights[name].shape
    groups = columns // grid.columns_of(columns)
    codes, scales = ("fp8", "fp32") if grid.is_fp8 else ("uint8", "fp16")
    kinds = [(CODES, columns, codes), (SCALES, groups, scales)]
    kinds += [(MINIMA, groups, "fp16")] if grid.has_minima else []
    kinds += [(ZEROS, groups, "uint8")] if grid.zero_points else []
    parts: Parts = {}
    for part, width, dtype in kinds:
        weight = Weight(sources, (*rows, width), dtype, grid, part)
        kind = ir.TensorType(_TYPES[dtype])
        value = ir.Value(name=f"{name}.{part}", shape=ir.Shape(weight.shape), type=kind)
        step.graph.initializers[f"{name}.{part}"] = value
        step.weights[f"{name}.{part}"] = weight
        parts[part] = value
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
