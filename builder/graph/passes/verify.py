"""Check what every target relies on; a breach is a fault of the passes before."""

import onnx_ir as ir

from llmbuild.builder.graph.passes.rewrite import made_by, nodes_of
from llmbuild.builder.graph.step_graph import INPUTS, OUTPUT, StepGraph
from llmbuild.errors import InternalError
from llmbuild.plugins.registry import DOMAIN, PLUGINS


def verify(step: StepGraph) -> None:
    """Raises InternalError, naming the node or value, when the graph breaks its contract."""
    graph = step.graph
    _require(tuple(str(value.name) for value in graph.inputs) == INPUTS, "its inputs changed")
    _require([value.name for value in graph.outputs] == [OUTPUT], "its output changed")
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
