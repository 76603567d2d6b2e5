"""Linears and gathers of the reference whose matrix is large: run in blocks of its rows."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import reduce
from math import prod

import onnx_ir as ir
import torch

from llmbuild.builder.graph.materialise import ReadTensor, as_torch, parts_of, weight_parts
from llmbuild.builder.graph.step_graph import CODES, StepGraph, Weight
from llmbuild.quant.grid import QuantisedMatrix
from llmbuild.quant.reader import PartReader

BLOCK_BYTES = 8 << 20  # of a matrix in fp32

Inputs = Sequence[torch.Tensor | None]

# Which input goes along with the rows: a bias has an item for each, an index their numbers.
_BIAS_SLOTS = {"linear": 2, "quantised_linear": 4}
_INDEX_SLOTS = {"gather_rows": 1, "gather_quantised_rows": 3}


def large_matrix(
    step: StepGraph, node: ir.Node, values: Mapping[ir.Value, torch.Tensor], read: ReadTensor
) -> Weight | None:
    """The matrix that a node has to go through in blocks, as it is too large to be held and can be
    read in parts; of a quantised one, the codes. None where there is none that isn't read yet."""
    if not isinstance(read, PartReader) or node.op_type not in _BIAS_SLOTS | _INDEX_SLOTS:
        return None
    for value in node.inputs:
        weight = None if value in values else _weight(step, value)
        if weight is not None and weight.part in ("", CODES) and len(weight.shape) == 2:
            return weight if 4 * prod(weight.shape) > BLOCK_BYTES else None
    return None


def is_part_of(matrix: Weight | None, step: StepGraph, value: ir.Value | None) -> bool:
    """Whether a value is the matrix, or the scales and so on of a quantised one."""
    weight = _weight(step, value)
    return matrix is not None and weight is not None and weight.sources == matrix.sources


def run_in_blocks(
    matrix: Weight,
    step: StepGraph,
    node: ir.Node,
    inputs: Inputs,
    read: ReadTensor,
    run: Callable[[Inputs], torch.Tensor | tuple[torch.Tensor, ...]],
) -> torch.Tensor:
    """What the node gives. inputs: the node's, without the matrix. run: runs the node."""
    outputs = map(run, _blocks(matrix, step, node, inputs, read))
    tensors = (output for output in outputs if isinstance(output, torch.Tensor))
    if node.op_type in _INDEX_SLOTS:
        return reduce(torch.add, tensors)  # each has zeros where a row is another block's
    x = inputs[0]
    assert x is not None
    y, column = torch.empty(x.shape[0], matrix.shape[0]), 0
    for tensor in tensors:  # not held beside each other: logits may be the largest of all
        y[:, column : column + tensor.shape[1]] = tensor
        column += tensor.shape[1]
    return y


def _blocks(
    matrix: Weight, step: StepGraph, node: ir.Node, inputs: Inputs, read: ReadTensor
) -> Iterator[Inputs]:
    """The node's inputs with some rows of the matrix, and with what goes along with these."""
    slots = {
        slot: step.weights[str(value.name)].part
        for slot, value in enumerate(node.inputs)
        if value is not None and is_part_of(matrix, step, value)
    }
    begin = 0
    for block in weight_parts(matrix, read, BLOCK_BYTES):
        arrays = parts_of(block) if isinstance(block, QuantisedMatrix) else {"": block}
        end = begin + block.shape[0]
        own = list(inputs)
        for slot, tensor in enumerate(inputs):
            if slot in slots:
                own[slot] = as_torch(arrays[slots[slot]])
            elif tensor is not None and slot == _BIAS_SLOTS.get(node.op_type):
                own[slot] = tensor[begin:end]
            elif tensor is not None and slot == _INDEX_SLOTS.get(node.op_type):
                own[slot] = tensor - begin
        yield own
        begin = end


def _weight(step: StepGraph, value: ir.Value | None) -> Weight | None:
    return None if value is None else step.weights.get(str(value.name))
