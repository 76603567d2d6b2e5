"""Norms, gated activations, quantised linears and tables as plugins."""

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from llmbuild.builder.graph.materialise import materialise_matrix
from llmbuild.builder.graph.passes.quantise import ACTIVATION_SCALES_SLOT
from llmbuild.builder.graph.step_graph import Weight
from llmbuild.builder.targets.gpu.pack import pack
from llmbuild.builder.targets.tensorrt import linears
from llmbuild.builder.targets.tensorrt.lowering import Tensor, optional_input
from llmbuild.builder.targets.tensorrt.plugin_lowering import PluginLowering
from llmbuild.plugins.common.weight_format import WeightFormat
from llmbuild.plugins.gated_activation import tensorrt as gated_plugins
from llmbuild.plugins.gather_rows import tensorrt as gather_plugins
from llmbuild.plugins.layer_norm import tensorrt as layer_norm_plugins
from llmbuild.plugins.linear import tensorrt as linear_plugins
from llmbuild.plugins.rms_norm import tensorrt as rms_norm_plugins
from llmbuild.quant.grid import QuantisedMatrix


def rms_norm(lowering: PluginLowering, node: ir.Node) -> None:
    x, weight = lowering.tensor(node.inputs[0]), lowering.fp32(node.inputs[1])
    plugin = rms_norm_plugins.rms_norm(
        lowering.paged.sm,
        lowering.activations,
        width=x.shape[1],
        group=weight.shape[0],
        eps=node.attributes["eps"].as_float(),
    )
    (lowering.tensors[node.outputs[0]],) = lowering.plugin(plugin, x=x, weight=weight)


def add_rms_norm(lowering: PluginLowering, node: ir.Node) -> None:
    x, residual = (lowering.tensor(value) for value in node.inputs[:2])
    eps = node.attributes["eps"].as_float()
    plugin = rms_norm_plugins.add_rms_norm(lowering.paged.sm, lowering.activations, x.shape[1], eps)
    results = lowering.plugin(plugin, x=x, residual=residual, weight=lowering.fp32(node.inputs[2]))
    lowering.tensors |= zip(node.outputs, results, strict=True)


def layer_norm(lowering: PluginLowering, node: ir.Node) -> None:
    x, bias = lowering.tensor(node.inputs[0]), optional_input(node, 2)
    plugin = layer_norm_plugins.layer_norm(
        lowering.paged.sm,
        lowering.activations,
        width=x.shape[1],
        has_bias=bias is not None,
        eps=node.attributes["eps"].as_float(),
    )
    vectors = lowering.optional_fp32(weight=node.inputs[1], bias=bias)
    (lowering.tensors[node.outputs[0]],) = lowering.plugin(plugin, x=x, **vectors)


def gated_activation(lowering: PluginLowering, node: ir.Node) -> None:
    """Of the halves of one value the plugin reads that value."""
    whole = _split_in_halves(node)
    values = (
        {"gate": whole}
        if whole is not None
        else dict(zip(("gate", "up"), node.inputs, strict=True))
    )
    tensors = {name: lowering.tensor(value) for name, value in values.items()}
    plugin = gated_plugins.gated_activation(
        lowering.paged.sm,
        lowering.activations,
        kind=node.attributes["activation"].as_string(),
        width=tensors["gate"].shape[1] // (2 if whole is not None else 1),
        is_merged=whole is not None,
    )
    (lowering.tensors[node.outputs[0]],) = lowering.plugin(plugin, **tensors)


def _split_in_halves(node: ir.Node) -> ir.Value | None:
    """The value that gate and up are halves of, if they are."""
    gate, up = node.inputs
    assert gate is not None
    assert up is not None
    split = gate.producer()
    if split is None or split.op_type != "Split" or tuple(split.outputs) != (gate, up):
        return None
    assert gate.shape is not None
    assert up.shape is not None
    return split.inputs[0] if gate.shape[1] == up.shape[1] else None


def quantised_linear(lowering: PluginLowering, node: ir.Node) -> None:
    """FP8 by TensorRT's own layers."""
    if _weight(lowering, node.inputs[1]).dtype == "fp8":
        linears.quantised_linear(lowering, node)
        return
    matrix, bias = _matrix(lowering, node.inputs[1]), optional_input(node, 4)
    x = {"x": lowering.tensor(node.inputs[0])}
    group = node.attributes["activation_group"].as_int()
    if group:
        x = _rounded(lowering, x["x"], group, optional_input(node, ACTIVATION_SCALES_SLOT))
    rows, columns = matrix.shape
    plugin = linear_plugins.quantised_linear(
        lowering.paged.sm,
        weight_format(matrix),
        lowering.activations,
        (rows, columns),
        has_bias=bias is not None,
        activation_group=group,
    )
    weights = _packed(lowering, node.inputs[1], matrix)
    result = lowering.plugin(plugin, **x, **weights, **lowering.optional_fp32(bias=bias))
    (lowering.tensors[node.outputs[0]],) = result


def _rounded(
    lowering: PluginLowering, x: Tensor, group: int, static_scales: ir.Value | None
) -> dict[str, Tensor]:
    """Codes and scales of activations, as quantised_linear's plugin calls them."""
    plugin = linear_plugins.quantise_rows(
        lowering.paged.sm,
        lowering.activations,
        width=x.shape[1],
        group=group,
        is_static=static_scales is not None,
    )
    given = lowering.optional_fp32(static_scales=static_scales)
    codes, scales = lowering.plugin(plugin, x=x, **given)
    return {"x": codes, "x_scales": scales}


def gather_quantised_rows(lowering: PluginLowering, node: ir.Node) -> None:
    matrix = _matrix(lowering, node.inputs[0])
    plugin = gather_plugins.gather_quantised_rows(
        lowering.paged.sm,
        weight_format(matrix),
        lowering.activations,
        width=matrix.shape[1],
        first=node.attributes["first"].as_int(),
    )
    index = lowering.tensor(node.inputs[3])
    weights = _packed(lowering, node.inputs[0], matrix)
    (lowering.tensors[node.outputs[0]],) = lowering.plugin(plugin, index=index, **weights)


def weight_format(matrix: QuantisedMatrix) -> WeightFormat:
    grid = matrix.grid
    assert not grid.is_fp8, "FP8 goes by TensorRT's own layers, and no table is of it"
    return WeightFormat(
        "int4" if grid.bits == 4 else "int8",
        grid.group_size,
        "zeros" if grid.zero_points else "minima" if grid.has_minima else "",
    )


def _weight(lowering: PluginLowering, codes: ir.Value | None) -> Weight:
    assert codes is not None
    return lowering.step.weights[str(codes.name)]


def _matrix(lowering: PluginLowering, codes: ir.Value | None) -> QuantisedMatrix:
    return materialise_matrix(_weight(lowering, codes), lowering.read)


def _packed(
    lowering: PluginLowering, codes: ir.Value | None, matrix: QuantisedMatrix
) -> dict[str, Tensor]:
    """A matrix as kernels read it; bytes are int8 in TensorRT's plugins."""

    def make() -> dict[str, Tensor]:
        packed = pack(matrix)
        arrays: dict[str, NDArray[np.generic] | None] = {
            "codes": packed.codes.view(np.int8),
            "scales": packed.scales,
            "minima": packed.minima,
            "zeros": packed.zeros,
        }
        return {
            name: lowering.constant(array) for name, array in arrays.items() if array is not None
        }

    return lowering.once(("packed", codes), make)
