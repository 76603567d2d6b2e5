"""Run a step graph in torch, node by node: the truth that compiled engines are held against.

All steps of a run go through a node before the next node's weight is read, so a run holds one
weight at a time, whatever the model's size. That needs steps which never write a slot twice
with different content: an attention then finds later steps' keys in the pool already, but past
its own positions, where the causal mask hides them.
"""

from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np
import onnx_ir as ir
import torch
from numpy.typing import NDArray

from llmbuild.builder.graph.materialise import ReadTensor, as_torch, materialise
from llmbuild.builder.graph.step_graph import INPUTS, StepGraph
from llmbuild.plugins.common.kv_pools import LayerPools, bind_kv_pools
from llmbuild.plugins.registry import DOMAIN, PLUGINS
from llmbuild.runtime.batch import StepBatch

Values = dict[ir.Value, torch.Tensor]

_TORCH_TYPES = {ir.DataType.FLOAT: torch.float32, ir.DataType.INT64: torch.int64}


def _split(node: ir.Node, value: torch.Tensor, sizes: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return value.split(sizes.tolist(), dim=node.attributes["axis"].as_int())


_STANDARD: dict[str, Callable[..., torch.Tensor | tuple[torch.Tensor, ...]]] = {
    "Add": lambda _, a, b: a + b,
    "Mul": lambda _, a, b: a * b,
    "Sigmoid": lambda _, a: a.sigmoid(),
    "Cast": lambda node, a: a.to(_TORCH_TYPES[node.attributes["to"].as_int()]),
    "Constant": lambda node: torch.tensor(node.attributes["value_ints"].as_ints()),
    "Gather": lambda node, a, index: a.index_select(node.attributes["axis"].as_int(), index),
    "Reshape": lambda _, a, shape: a.reshape(shape.tolist()),
    "Split": _split,
}


def run_steps(
    step: StepGraph, read: ReadTensor, batches: Sequence[StepBatch], pools: Sequence[LayerPools]
) -> list[NDArray[np.float32]]:
    """The logits, fp32 [R, vocab], of each batch; the pools are written in place.

    read: gives a canonical tensor's values; called once for every tensor of the graph.
    """
    environments: list[Values] = [_inputs(step, batch) for batch in batches]
    weights: Values = {}
    uses_left: Counter[ir.Value] = Counter()
    for node in step.graph:
        uses_left.update(value for value in node.inputs if value is not None)
    uses_left.update(step.graph.outputs)
    initializers = set(step.graph.initializers.values())
    with bind_kv_pools(pools), torch.no_grad():
        for node in step.graph:
            for value in node.inputs:
                if value in initializers and value not in weights:
                    weights[value] = as_torch(materialise(step, str(value.name), read))
            for environment in environments:
                _run_node(node, environment, weights)
            for value in node.inputs:
                if value is not None:
                    uses_left[value] -= 1
                    if not uses_left[value]:
                        _forget(value, weights, *environments)
    logits = step.graph.outputs[0]
    return [environment[logits].numpy() for environment in environments]


def _forget(value: ir.Value, *holders: Values) -> None:
    for holder in holders:
        holder.pop(value, None)


def _inputs(step: StepGraph, batch: StepBatch) -> Values:
    arrays = {name: torch.from_numpy(getattr(batch, name)) for name in INPUTS}
    return {value: arrays[str(value.name)] for value in step.graph.inputs}


def _run_node(node: ir.Node, environment: Values, weights: Values) -> None:
    inputs = [
        None if value is None else weights[value] if value in weights else environment[value]
        for value in node.inputs
    ]
    if node.domain == DOMAIN:
        outputs = _run_plugin(node, inputs)
    else:
        outputs = _STANDARD[node.op_type](node, *inputs)
    if isinstance(outputs, torch.Tensor):
        outputs = (outputs,)
    environment.update(zip(node.outputs, outputs, strict=True))


def _run_plugin(
    node: ir.Node, inputs: Sequence[torch.Tensor | None]
) -> torch.Tensor | tuple[torch.Tensor, ...]:
    """Call the plugin with its tensors in order, absent trailing ones as None."""
    op = PLUGINS[node.op_type]
    attributes = {name: attribute.value for name, attribute in node.attributes.items()}
    names = [argument.name for argument in op._opoverload._schema.arguments]
    tensors = [name for name in names if name not in attributes]
    padded = [*inputs, *[None] * (len(tensors) - len(inputs))]
    return op(**dict(zip(tensors, padded, strict=True)), **attributes)
