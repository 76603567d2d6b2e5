"""QK-norm, rotary and the KV write of a layer, in one node."""

import onnx_ir as ir

from llmbuild.builder.graph.passes.rewrite import made_by, nodes_of, only_user, plugin_node, replace
from llmbuild.builder.graph.step_graph import StepGraph


def place_rope_kv_write(step: StepGraph) -> None:
    for write in nodes_of(step.graph, "kv_write"):
        k_rotated, v, positions, query_start, block_tables = write.inputs
        attention = only_user(write.outputs[0])
        if attention is None or attention.op_type != "paged_attention":
            continue
        q_rotary = _made_for_one(attention.inputs[0], "rotary")
        k_rotary = _made_for_one(k_rotated, "rotary")
        if q_rotary is None or k_rotary is None or q_rotary.inputs[1] is not k_rotary.inputs[1]:
            continue
        norms = _head_norms(q_rotary, k_rotary)
        q, k = (node.inputs[0] for node in norms or (q_rotary, k_rotary))
        q_weight, k_weight = (node.inputs[1] for node in norms) if norms else (None, None)
        eps = _eps(norms[0]) if norms else 0.0
        new = plugin_node(
            "rope_kv_write",
            [q, k, v, k_rotary.inputs[1], q_weight, k_weight, positions, query_start, block_tables],
            {"layer": write.attributes["layer"].as_int(), "eps": eps},
            outputs=2,
        )
        old = [*norms, q_rotary, k_rotary, write]
        old_values = [q_rotary.outputs[0], write.outputs[0]]
        replace(step.graph, write, old, [new], old_values, new.outputs)


def _made_for_one(value: ir.Value | None, op_type: str) -> ir.Node | None:
    """The node that makes a value, if it is of this kind and has one user."""
    node = made_by(value, op_type)
    return node if node is not None and only_user(node.outputs[0]) is not None else None


def _head_norms(q_rotary: ir.Node, k_rotary: ir.Node) -> list[ir.Node]:
    """The norms of Q and K that the new node can take in: over each head, with the same eps."""
    q_norm, k_norm = (_made_for_one(node.inputs[0], "rms_norm") for node in (q_rotary, k_rotary))
    if q_norm is None or k_norm is None or _eps(q_norm) != _eps(k_norm):
        return []
    widths = {_width(value) for value in (q_norm.inputs[1], k_norm.inputs[1], q_rotary.inputs[1])}
    return [q_norm, k_norm] if len(widths) == 1 else []


def _eps(norm: ir.Node) -> float:
    return norm.attributes["eps"].as_float()


def _width(value: ir.Value | None) -> int | ir.SymbolicDim:
    assert value is not None
    assert value.shape is not None
    return value.shape[-1]
