"""Split, activations and arithmetic, each value for itself."""

import onnx_ir as ir

from llmbuild.builder.targets.tensorrt.lowering import Lowering, Tensor

ARITHMETIC = {"Add": "SUM", "Sub": "SUB", "Mul": "PROD", "Div": "DIV"}
FUNCTIONS = {"Tanh": "TANH", "Sigmoid": "SIGMOID"}


def split(lowering: Lowering, node: ir.Node) -> None:
    x, begin = lowering.tensor(node.inputs[0]), 0
    for output in node.outputs:
        assert output.shape is not None
        width = output.shape[1]
        assert isinstance(width, int)
        lowering.tensors[output] = lowering.columns(x, begin, width)
        begin += width


def gated_activation(lowering: Lowering, node: ir.Node) -> None:
    gate, up = (lowering.tensor(value) for value in node.inputs)
    activated = _activated(lowering, gate, node.attributes["activation"].as_string())
    lowering.tensors[node.outputs[0]] = lowering.binary("PROD", activated, up)


def activation(lowering: Lowering, node: ir.Node) -> None:
    x = lowering.tensor(node.inputs[0])
    kind = node.attributes["kind"].as_string()
    lowering.tensors[node.outputs[0]] = _activated(lowering, x, kind)


def _activated(lowering: Lowering, x: Tensor, kind: str) -> Tensor:
    match kind:
        case "silu":
            return lowering.binary("PROD", x, lowering.activation("SIGMOID", x))
        case "relu2":
            positive = lowering.activation("RELU", x)
            return lowering.binary("PROD", positive, positive)
        case _:
            layers = {"gelu": "GELU_ERF", "gelu_tanh": "GELU_TANH", "relu": "RELU"}
            return lowering.activation(layers[kind], x)


def function(lowering: Lowering, node: ir.Node) -> None:
    x = lowering.tensor(node.inputs[0])
    lowering.tensors[node.outputs[0]] = lowering.activation(FUNCTIONS[node.op_type], x)


def arithmetic(lowering: Lowering, node: ir.Node) -> None:
    numbers = [_number(value) for value in node.inputs]
    like = next(
        lowering.tensor(value)
        for value, number in zip(node.inputs, numbers, strict=True)
        if number is None
    )
    left, right = (
        lowering.tensor(value) if number is None else lowering.number(number, like)
        for value, number in zip(node.inputs, numbers, strict=True)
    )
    operation = ARITHMETIC[node.op_type]
    lowering.tensors[node.outputs[0]] = lowering.binary(operation, left, right)


def constant(lowering: Lowering, node: ir.Node) -> None:
    """Nothing to do: whoever reads a constant reads it now."""


def _number(value: ir.Value | None) -> float | None:
    """The number that a Constant node makes, None for any other value."""
    node = value.producer() if value is not None else None
    if node is None or node.op_type != "Constant":
        return None
    (attribute,) = node.attributes.values()
    if attribute.type == ir.AttributeType.TENSOR:
        return float(attribute.as_tensor().numpy().reshape(()))
    return attribute.as_float()
