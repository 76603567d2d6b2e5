"""Rows taken out of tables by index: embeddings, and those whose logits are wanted."""

import numpy as np
import onnx_ir as ir

from llmbuild.builder.graph.materialise import materialise_matrix
from llmbuild.builder.targets.tensorrt.limits import TOKEN_IDS
from llmbuild.builder.targets.tensorrt.lowering import Lowering, Tensor


def gather_rows(lowering: Lowering, node: ir.Node) -> None:
    table, index = node.inputs
    assert table is not None
    rows = lowering.tensor(index)
    if table in lowering.tensors:
        lowering.tensors[node.outputs[0]] = lowering.add("gather", lowering.tensors[table], rows, 0)
        return
    count = lowering.step.weights[str(table.name)].shape[0]
    lowering.tensors[node.outputs[0]] = _own_rows(
        lowering, node, lowering.matrix(table), rows, count
    )


def gather_quantised_rows(lowering: Lowering, node: ir.Node) -> None:
    """From the table's values in the activations' dtype: TensorRT takes codes only where it
    dequantises all of them, which would be done in every step."""
    codes, index = node.inputs[0], node.inputs[3]
    assert codes is not None
    name = str(codes.name)
    matrix = materialise_matrix(lowering.step.weights[name], lowering.read)
    table = lowering.constant(lowering.to_activations(matrix.dequantised(), name))
    lowering.tensors[node.outputs[0]] = _own_rows(
        lowering, node, table, lowering.tensor(index), len(matrix.codes)
    )


def _own_rows(
    lowering: Lowering, node: ir.Node, table: Tensor, index: Tensor, count: int
) -> Tensor:
    """Rows of a table that has `count` of a larger one; zeros for those that it hasn't."""
    is_by_token = any(value is not None and value.name == TOKEN_IDS for value in node.inputs)
    shard = lowering.step.shard
    if shard is None or not shard.is_split or not is_by_token:  # a rank has all of other tables
        return lowering.add("gather", table, index, 0)
    first = node.attributes["first"].as_int()
    first, zero, last = (
        lowering.constant(np.array([value], np.int32)) for value in (first, 0, count - 1)
    )
    places = lowering.binary("SUB", index, first)
    within = lowering.binary("MIN", lowering.binary("MAX", places, zero), last)
    has = lowering.reshape(lowering.binary("EQUAL", places, within), -1, 1)
    found = lowering.add("gather", table, within, 0)
    return lowering.add("select", has, found, lowering.number(0.0, found))
