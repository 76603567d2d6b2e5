"""Run a step graph in torch, node by node: the truth that compiled engines are held against.

A list of steps runs as one: every sequence of every step becomes a sequence of one ragged step.
So each weight is read once and held alone, whatever the model's size. That needs steps which
never write a slot twice with different content: an attention then finds the keys of later steps
in the pool already, but past its own positions, where the causal mask hides them. Large matrices
that can be read in parts aren't held at all, but gone through in blocks of rows.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from math import prod

import numpy as np
import onnx_ir as ir
import torch
from numpy.typing import NDArray

from llmbuild.builder.graph.materialise import (
    ReadTensor,
    as_torch,
    materialise,
    materialise_matrix,
    parts_of,
)
from llmbuild.builder.graph.row_blocks import is_part_of, large_matrix, run_in_blocks
from llmbuild.builder.graph.step_graph import CODES, HIDDEN, INPUTS, StepGraph, Weight
from llmbuild.plugins.common.kv_pools import LayerPools, bind_kv_pools
from llmbuild.plugins.registry import DOMAIN, PLUGINS
from llmbuild.runtime.batch import StepBatch

Values = dict[ir.Value, torch.Tensor]

_TORCH_TYPES = {ir.DataType.FLOAT: torch.float32, ir.DataType.INT64: torch.int64}


def _split(node: ir.Node, value: torch.Tensor, sizes: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return value.split(sizes.tolist(), dim=node.attributes["axis"].as_int())


def _constant(node: ir.Node) -> torch.Tensor:
    (attribute,) = node.attributes.values()
    if attribute.type == ir.AttributeType.TENSOR:
        return torch.tensor(attribute.as_tensor().numpy())
    return torch.tensor(attribute.value)


_STANDARD: dict[str, Callable[..., torch.Tensor | tuple[torch.Tensor, ...]]] = {
    "Add": lambda _, a, b: a + b,
    "Sub": lambda _, a, b: a - b,
    "Mul": lambda _, a, b: a * b,
    "Div": lambda _, a, b: a / b,
    "Tanh": lambda _, a: a.tanh(),
    "Sigmoid": lambda _, a: a.sigmoid(),
    "Cast": lambda node, a: a.to(_TORCH_TYPES[node.attributes["to"].as_int()]),
    "Constant": lambda node: _constant(node),
    "Gather": lambda node, a, index: a.index_select(node.attributes["axis"].as_int(), index),
    "Reshape": lambda _, a, shape: a.reshape(shape.tolist()),
    "Split": _split,
}


def run_steps(
    step: StepGraph,
    read: ReadTensor,
    batches: Sequence[StepBatch],
    pools: Sequence[LayerPools],
    advance: Callable[[int], None] = lambda items: None,
) -> list[NDArray[np.float32]]:
    """The logits, fp32 [R, vocab], of each batch; the pools are written in place.

    read: gives a canonical tensor's values; called once for every tensor of the graph, but for a
    large one that it can give in parts once for every node that reads it. advance: told of each
    node what `weight_items` says.
    """
    with bind_kv_pools(pools), torch.no_grad():
        for node, values in running(step, read, _as_one(batches)):
            advance(weight_items(step, node))
            last = values
    logits = last[step.graph.outputs[0]].numpy()
    ends = np.cumsum([len(batch.logit_rows) for batch in batches])
    return np.split(logits, ends[:-1])


def weight_items(step: StepGraph, node: ir.Node) -> int:
    """How many weights a node reads; scales, minima and zeros not counted."""
    names = (str(value.name) for value in node.inputs if value is not None)
    weights = (step.weights[name] for name in names if name in step.weights)
    return sum(prod(weight.shape) for weight in weights if weight.part in ("", CODES))


def running(
    step: StepGraph, read: ReadTensor, batch: StepBatch, hidden: torch.Tensor | None = None
) -> Iterator[tuple[ir.Node, Values]]:
    """Runs a step's nodes in order; before each, gives it with all values that are yet needed.

    hidden: for the graph of a stage that isn't the first, what the stage before made.

    Whoever looks on may put values in: a weight that is there isn't read, and a node whose first
    output is there isn't run. To be exhausted, or dropped, with the KV pools bound and gradients
    off. Weights leave the values with their last reader, as all values do.
    """
    values = _inputs(step, batch, hidden)
    initializers = set(step.graph.initializers.values())
    uses_left: Counter[ir.Value] = Counter(step.graph.outputs)
    for node in step.graph:
        uses_left.update(value for value in node.inputs if value is not None)
    for node in step.graph:
        yield node, values
        if node.outputs[0] not in values:
            matrix = large_matrix(step, node, values, read)
            for value in node.inputs:
                if (
                    value in initializers
                    and value not in values
                    and not is_part_of(matrix, step, value)
                ):
                    values |= _weight(step, value, read)
            values |= _outputs(step, node, values, matrix, read)
        for value in node.inputs:
            if value is not None:
                uses_left[value] -= 1
                if not uses_left[value]:
                    values.pop(value, None)


def _as_one(batches: Sequence[StepBatch]) -> StepBatch:
    """One step with the sequences of all, in order; block tables padded to the longest."""
    tokens_before = np.cumsum([0, *(batch.num_tokens for batch in batches)], dtype=np.int32)
    width = max(batch.block_tables.shape[1] for batch in batches)
    tables = [
        np.pad(batch.block_tables, ((0, 0), (0, width - batch.block_tables.shape[1])))
        for batch in batches
    ]
    counted = list(zip(batches, tokens_before[:-1], strict=True))
    return StepBatch(
        token_ids=np.concatenate([batch.token_ids for batch in batches]),
        positions=np.concatenate([batch.positions for batch in batches]),
        query_start=np.concatenate(
            [*(batch.query_start[:-1] + before for batch, before in counted), tokens_before[-1:]]
        ),
        kv_lengths=np.concatenate([batch.kv_lengths for batch in batches]),
        block_tables=np.concatenate(tables),
        logit_rows=np.concatenate([batch.logit_rows + before for batch, before in counted]),
    )


def _inputs(step: StepGraph, batch: StepBatch, hidden: torch.Tensor | None) -> Values:
    arrays = {name: torch.from_numpy(getattr(batch, name)) for name in INPUTS}
    if hidden is not None:
        arrays[HIDDEN] = hidden
    return {value: arrays[str(value.name)] for value in step.graph.inputs}


def _weight(step: StepGraph, value: ir.Value, read: ReadTensor) -> Values:
    """An initialiser's values; with a part of a quantised matrix come the others."""
    name = str(value.name)
    weight = step.weights.get(name)
    if weight is None or weight.grid is None:
        return {value: as_torch(materialise(step, name, read))}
    parts = parts_of(materialise_matrix(weight, read))
    stem = name.removesuffix(weight.part)
    return {step.graph.initializers[stem + part]: as_torch(a) for part, a in parts.items()}


def _outputs(
    step: StepGraph, node: ir.Node, values: Values, matrix: Weight | None, read: ReadTensor
) -> Values:
    """What a node gives; matrix: that it goes through in blocks, if it does."""
    inputs = [
        None if value is None or is_part_of(matrix, step, value) else values[value]
        for value in node.inputs
    ]
    outputs: torch.Tensor | tuple[torch.Tensor, ...]
    if matrix is not None:
        run = partial(_run_plugin, node)
        outputs = run_in_blocks(matrix, step, node, inputs, read, run)
    elif node.domain == DOMAIN:
        outputs = _run_plugin(node, inputs)
    else:
        outputs = _STANDARD[node.op_type](node, *inputs)
    as_tuple = (outputs,) if isinstance(outputs, torch.Tensor) else outputs
    return dict(zip(node.outputs, as_tuple, strict=True))


def _run_plugin(
    node: ir.Node, inputs: Sequence[torch.Tensor | None]
) -> torch.Tensor | tuple[torch.Tensor, ...]:
    """Call the plugin with its tensors in order, absent trailing ones as None."""
    op = PLUGINS[node.op_type]
    run = op._init_fn if torch.is_grad_enabled() else op  # the op itself has no gradient
    attributes = {name: attribute.value for name, attribute in node.attributes.items()}
    names = [argument.name for argument in op._opoverload._schema.arguments]
    tensors = [name for name in names if name not in attributes]
    padded = [*inputs, *[None] * (len(tensors) - len(inputs))]
    return run(**dict(zip(tensors, padded, strict=True)), **attributes)
