"""Where the scale of a linear's inputs can be changed exactly: in whatever makes them."""

from collections.abc import Callable
from dataclasses import dataclass

import onnx_ir as ir
import torch

from llmbuild.builder.graph.passes.rewrite import made_by, only_user, users
from llmbuild.builder.graph.step_graph import StepGraph


@dataclass(frozen=True)
class InputScale:
    """tensors: those whose rows (or items) shrink when the inputs' columns do. tied: the nearest
    scale that can be had of one that is wanted, both fp32 [columns]. of_rows: the scale of the
    tensors' rows that makes that one."""

    tensors: tuple[str, ...]
    tied: Callable[[torch.Tensor], torch.Tensor] = lambda scale: scale
    of_rows: Callable[[torch.Tensor], torch.Tensor] = lambda scale: scale


def input_scale_of(step: StepGraph, inputs: ir.Value, head_dim: int) -> InputScale | None:
    """How to scale the columns of a value that linears read; None where nothing does it exactly.

    A norm's weight and bias can, the values of attention (the heads that share one are tied), and
    the rows that a gate multiplies. All who read the value must be linears, with weights that
    nobody else reads, as an embedding's rows are where it is the head as well.
    """
    readers = users(inputs)
    if any(node.op_type != "linear" for node in readers):
        return None
    if any(
        weight is None or len(users(weight)) > 1 for _, weight, *_ in (n.inputs for n in readers)
    ):
        return None
    for kind in ("rms_norm", "layer_norm"):
        norm = made_by(inputs, kind)
        if norm is not None:
            return _of_parameters(step, norm, inputs)
    attention = made_by(inputs, "paged_attention")
    if attention is not None:
        return _of_attention(step, attention, inputs, head_dim)
    gate = made_by(inputs, "Mul", "")
    return None if gate is None else _of_gated(step, gate)


def _of_parameters(step: StepGraph, norm: ir.Node, inputs: ir.Value) -> InputScale | None:
    """A norm over whole rows: one over heads repeats its weight."""
    names = tuple(str(value.name) for value in norm.inputs[1:] if value is not None)
    width = step.weights[names[0]].shape[0]
    assert inputs.shape is not None
    return InputScale(names) if inputs.shape[1] == width else None


def _of_attention(
    step: StepGraph, attention: ir.Node, inputs: ir.Value, head_dim: int
) -> InputScale | None:
    write = made_by(attention.inputs[1], "kv_write")
    linear = None if write is None else made_by(write.inputs[1], "linear")
    if linear is None or only_user(linear.outputs[0]) is not write:
        return None
    names = _parameters(linear)
    kv_size = step.weights[names[0]].shape[0]
    assert inputs.shape is not None
    columns = inputs.shape[1]
    assert isinstance(columns, int)
    num_kv_heads, sharing = kv_size // head_dim, columns // kv_size

    def of_rows(scale: torch.Tensor) -> torch.Tensor:
        heads = scale.view(num_kv_heads, sharing, head_dim)
        return heads.log().mean(1).exp().flatten()

    def tied(scale: torch.Tensor) -> torch.Tensor:
        heads = of_rows(scale).view(num_kv_heads, 1, head_dim)
        return heads.expand(num_kv_heads, sharing, head_dim).flatten()

    return InputScale(names, tied, of_rows)


def _of_gated(step: StepGraph, gate: ir.Node) -> InputScale | None:
    """Of act(gate) * up: up's rows, which nobody else reads."""
    for value in gate.inputs:
        linear = made_by(value, "linear")
        if value is not None and linear is not None and only_user(value) is gate:
            return InputScale(_parameters(linear))
    return None


def _parameters(linear: ir.Node) -> tuple[str, ...]:
    """Weight, and bias if there is one."""
    return tuple(str(value.name) for value in linear.inputs[1:] if value is not None)
