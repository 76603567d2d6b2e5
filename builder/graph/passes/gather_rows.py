"""Gather of rows, and the cast to fp32 after it, become gather_rows."""

import onnx_ir as ir

from llmbuild.builder.graph.passes.rewrite import nodes_of, only_user, plugin_node, replace
from llmbuild.builder.graph.step_graph import StepGraph


def place_gather_rows(step: StepGraph) -> None:
    graph = step.graph
    for gather in nodes_of(graph, "Gather", ""):
        table = gather.inputs[0]
        if table is None or not _takes_rows(gather):
            continue
        last = gather
        if table.dtype != ir.DataType.FLOAT:
            cast = only_user(gather.outputs[0])
            if cast is None or cast.op_type != "Cast" or _target(cast) != ir.DataType.FLOAT:
                continue
            last = cast
        new = plugin_node("gather_rows", gather.inputs, {"first": 0}, outputs=1)
        old = [gather] if last is gather else [gather, last]
        replace(graph, last, old, [new], last.outputs, new.outputs)


def _takes_rows(gather: ir.Node) -> bool:
    """Whole rows of a matrix, by a vector of indices."""
    ranks = [len(value.shape or ()) for value in gather.inputs if value is not None]
    return gather.attributes["axis"].as_int() == 0 and ranks == [2, 1]


def _target(cast: ir.Node) -> int:
    return cast.attributes["to"].as_int()
