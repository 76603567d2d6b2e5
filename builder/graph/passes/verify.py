"""Check what every target relies on; a breach is a fault of the passes before."""

from collections.abc import Sequence
from itertools import zip_longest

import onnx_ir as ir

from llmbuild.builder.graph.passes.rewrite import made_by, nodes_of
from llmbuild.builder.graph.step_graph import StepGraph
from llmbuild.errors import InternalError
from llmbuild.plugins.registry import DOMAIN, PLUGINS


def verify(step: StepGraph) -> None:
    """Raises InternalError, naming the node or value, when the graph breaks its contract."""
    graph = step.graph
    _require(tuple(str(value.name) for value in graph.inputs) == step.inputs, "its inputs changed")
    _require([value.name for value in graph.outputs] == [step.output], "its output changed")
    defined: set[ir.Value] = {*graph.inputs, *graph.initializers.values()}
    for node in graph:
        for value in node.inputs:
            _require(value is None or value in defined, f"{node.name}: reads before it is made")
        _require(
            node.domain != DOMAIN or node.op_type in PLUGINS, f"{node.op_type}: no such plugin"
        )
        defined.update(node.outputs)
    _require(
        set(graph.initializers) == {*step.weights, *step.constants},
        "its weights lost their records",
    )
    _check_kv(step)


def collectives(step: StepGraph) -> list[str]:
    """The operations that wait for other ranks, in order, with the shapes of what they make."""
    nodes = nodes_of(step.graph, "all_reduce")
    return [f"{node.op_type} of {node.outputs[0].shape}" for node in nodes]


def verify_collectives(steps: Sequence[StepGraph]) -> None:
    """Raises InternalError unless the ranks of a stage wait for each other in one order, without
    which they would wait for ever."""
    first, *others = map(collectives, steps)
    for rank, own in enumerate(others, 1):
        pairs = list(zip_longest(first, own))
        wrong = next((pair for pair in pairs if pair[0] != pair[1]), None)
        if wrong is not None:
            raise InternalError(
                f"the ranks of a stage differ in collective number {pairs.index(wrong)}: rank 0 "
                f"has {wrong[0]}, rank {rank} {wrong[1]}"
            )


def _check_kv(step: StepGraph) -> None:
    """Each layer is written once, and read by an attention that waits for that write."""
    written = [
        node.attributes["layer"].as_int()
        for kind in ("kv_write", "rope_kv_write")
        for node in nodes_of(step.graph, kind)
    ]
    _require(sorted(written) == list(range(len(written))), f"layers written: {written}")
    for node in nodes_of(step.graph, "paged_attention"):
        layer = node.attributes["layer"].as_int()
        writer = made_by(node.inputs[1], "rope_kv_write") or made_by(node.inputs[1], "kv_write")
        _require(
            writer is not None and writer.attributes["layer"].as_int() == layer,
            f"attention of layer {layer} doesn't wait for its KV write",
        )


def _require(holds: bool, breach: str) -> None:
    if not holds:
        raise InternalError(f"the step graph broke its contract: {breach}")
