"""rms_norm, add_rms_norm and layer_norm, in plain layers, which TensorRT fuses into one kernel.
Sums, and all that follows up to the result, are fp32."""

import numpy as np
import onnx_ir as ir

from llmbuild.builder.targets.tensorrt.lowering import Lowering, Tensor, optional_input


def rms_norm(lowering: Lowering, node: ir.Node) -> None:
    x = lowering.tensor(node.inputs[0])
    eps = node.attributes["eps"].as_float()
    lowering.tensors[node.outputs[0]] = normalised(lowering, x, node.inputs[1], eps)


def add_rms_norm(lowering: Lowering, node: ir.Node) -> None:
    x, residual = (lowering.tensor(value) for value in node.inputs[:2])
    total = lowering.binary("SUM", x, residual)
    eps = node.attributes["eps"].as_float()
    lowering.tensors[node.outputs[0]] = total
    lowering.tensors[node.outputs[1]] = normalised(lowering, total, node.inputs[2], eps)


def normalised(lowering: Lowering, x: Tensor, weight: ir.Value | None, eps: float) -> Tensor:
    """RMSNorm over each run of len(weight) columns of [rows, features]."""
    factors = lowering.values(weight).astype(np.float32)
    width, group = x.shape[-1], len(factors)
    if group != width:
        x = lowering.reshape(x, -1, width // group, group)
    wide = lowering.cast(x, lowering.trt.float32)
    y = _by_root_mean_square(lowering, wide, eps)
    y = lowering.binary("PROD", y, _per_column(lowering, factors, y))
    y = lowering.cast(y, lowering.act)
    return y if group == width else lowering.reshape(y, -1, width)


def layer_norm(lowering: Lowering, node: ir.Node) -> None:
    weight, bias = node.inputs[1], optional_input(node, 2)
    wide = lowering.cast(lowering.tensor(node.inputs[0]), lowering.trt.float32)
    centred = lowering.binary("SUB", wide, _mean(lowering, wide))
    y = _by_root_mean_square(lowering, centred, node.attributes["eps"].as_float())
    factors = lowering.values(weight).astype(np.float32)
    y = lowering.binary("PROD", y, _per_column(lowering, factors, y))
    if bias is not None:
        offsets = lowering.values(bias).astype(np.float32)
        y = lowering.binary("SUM", y, _per_column(lowering, offsets, y))
    lowering.tensors[node.outputs[0]] = lowering.cast(y, lowering.act)


def _by_root_mean_square(lowering: Lowering, x: Tensor, eps: float) -> Tensor:
    square = _mean(lowering, lowering.binary("PROD", x, x))
    root = lowering.unary("SQRT", lowering.binary("SUM", square, lowering.number(eps, square)))
    return lowering.binary("DIV", x, root)


def _mean(lowering: Lowering, x: Tensor) -> Tensor:
    """Over the last axis, which stays."""
    axes = 1 << (len(x.shape) - 1)
    return lowering.add("reduce", x, lowering.trt.ReduceOperation.AVG, axes, True)


def _per_column(lowering: Lowering, values: np.ndarray, like: Tensor) -> Tensor:
    return lowering.constant(values.reshape((1,) * (len(like.shape) - 1) + (-1,)))
