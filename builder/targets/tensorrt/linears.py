"""linear and quantised_linear: a matrix product, whose weights may be dequantised as it runs."""

from math import prod
from typing import Any

import numpy as np
import onnx_ir as ir

from llmbuild.builder.graph.materialise import materialise_matrix
from llmbuild.builder.graph.passes.quantise import ACTIVATION_SCALES_SLOT
from llmbuild.builder.graph.step_graph import Weight
from llmbuild.builder.recipe.target import INT4_GROUP_SIZES
from llmbuild.builder.targets.tensorrt.lowering import Lowering, Tensor, optional_input
from llmbuild.quant.grid import QuantisedMatrix


def linear(lowering: Lowering, node: ir.Node) -> None:
    weight = lowering.matrix(node.inputs[1])
    none, transposed = lowering.trt.MatrixOperation.NONE, lowering.trt.MatrixOperation.TRANSPOSE
    x = lowering.tensor(node.inputs[0])
    y = lowering.add("matrix_multiply", x, none, weight, transposed)
    lowering.tensors[node.outputs[0]] = _with_bias(lowering, y, optional_input(node, 2))


def quantised_linear(lowering: Lowering, node: ir.Node) -> None:
    """Codes are stored [in, out], as the fused kernels want them."""
    codes = node.inputs[1]
    assert codes is not None
    weight = lowering.step.weights[str(codes.name)]
    _check_grid(lowering, node, weight)
    x = lowering.tensor(node.inputs[0])
    group = node.attributes["activation_group"].as_int()
    matrix = materialise_matrix(weight, lowering.read)
    _check_reach(lowering, weight.sources[0], matrix)
    if group:
        dtype = lowering.trt.fp8 if matrix.grid.is_fp8 else lowering.trt.int8
        x = _rounded(lowering, node, x, weight.shape[1] // group, dtype)
    dequantised = _int4(lowering, matrix) if matrix.grid.bits == 4 else _by_row(lowering, matrix)
    none = lowering.trt.MatrixOperation.NONE
    y = lowering.add("matrix_multiply", x, none, dequantised, none)
    lowering.tensors[node.outputs[0]] = _with_bias(lowering, y, optional_input(node, 4))


def _with_bias(lowering: Lowering, y: Tensor, bias: ir.Value | None) -> Tensor:
    return y if bias is None else lowering.binary("SUM", y, lowering.row(bias))


def _check_grid(lowering: Lowering, node: ir.Node, weight: Weight) -> None:
    grid, group = weight.grid, node.attributes["activation_group"].as_int()
    assert grid is not None
    if not grid.symmetric:
        raise lowering.refusal(node, grid.describe(), "choose a symmetric grid")
    if grid.bits == 8 and grid.group_size:
        raise lowering.refusal(node, grid.describe(), "give int8 weights one group a row")
    if grid.bits == 4 and grid.columns_of(weight.shape[1]) not in INT4_GROUP_SIZES:
        allowed = f"groups of {', '.join(map(str, INT4_GROUP_SIZES))}"
        raise lowering.refusal(node, grid.describe(), f"give int4 weights {allowed}")
    if grid.bits == 4 and group:
        raise lowering.refusal(
            node, "int4 weights and int8 activations", "choose w4a16 or w8a8-static"
        )
    if grid.bits == 4 and lowering.act != lowering.trt.float16:  # scales would be rounded to bf16
        raise lowering.refusal(node, "int4 weights and bf16 activations", "choose fp16 activations")


def _check_reach(lowering: Lowering, name: str, matrix: QuantisedMatrix) -> None:
    """What codes stand for has to be within the activations' dtype."""
    codes = matrix.typed_codes.astype(np.float32) - np.float32(matrix.grid.zero)
    grouped = np.abs(codes).reshape(*matrix.scales.shape, -1).max(2)
    lowering.to_activations(grouped * matrix.scales.astype(np.float32), name)


def _rounded(lowering: Lowering, node: ir.Node, x: Tensor, groups: int, dtype: Any) -> Tensor:
    """Activations as their codes, int8 or FP8, give them back: one scale for the whole tensor is
    all that the fused kernels have. (TensorRT's int8 reaches -128, ours -127.)"""
    scales = optional_input(node, ACTIVATION_SCALES_SLOT)
    if scales is None:
        raise lowering.refusal(
            node, "scales of its activations that aren't static", "choose w8a8-static"
        )
    values = lowering.values(scales)
    if prod(values.shape) != groups or len(np.unique(values)) != 1:
        text = f"{len(np.unique(values))} different scales for its activations' columns"
        raise lowering.refusal(node, text, "calibrate one scale for all columns, or choose w8a16")
    scale = lowering.constant(np.array(values.flat[0], np.float32))
    codes = lowering.add("quantize", x, scale, dtype)
    return lowering.add("dequantize", codes, scale, lowering.act)


def _int4(lowering: Lowering, matrix: QuantisedMatrix) -> Tensor:
    """Two codes a byte, the low half first; groups run along [in]."""
    signed = (matrix.codes.T - np.uint8(matrix.grid.zero)).reshape(-1) & np.uint8(15)
    packed = signed[0::2] | (signed[1::2] << 4)
    shape = (matrix.shape[1], matrix.shape[0])
    codes = lowering.packed_constant(packed, lowering.trt.int4, shape)
    scales = lowering.constant(matrix.scales.T)
    return lowering.add("dequantize", codes, scales, lowering.act)


def _by_row(lowering: Lowering, matrix: QuantisedMatrix) -> Tensor:
    """Codes of a byte, int8 or FP8; fp32 scales go with activations of either dtype."""
    codes = matrix.typed_codes
    if not matrix.grid.is_fp8:
        codes = (matrix.codes ^ np.uint8(0x80)).view(np.int8)
    scales = lowering.constant(matrix.scales[:, 0].astype(np.float32))
    layer = lowering.layer("dequantize", lowering.constant(codes.T), scales, lowering.act)
    layer.axis = 1
    return layer.get_output(0)
