"""QK-norm, rotary and the KV write of a layer, in one node."""

import onnx_ir as ir

from llmbuild.builder.graph.passes.rewrite import made_by, nodes_of, only_user, plugin_node, replace
from llmbuild.builder.graph.step_graph import StepGraph


def place_rope_kv_write(step: StepGraph) -> None:
    for write in nodes_of(step.graph, "kv_write"):
        k_rotated, v, positions, query_start, block_tables = write.inputs
        attention = only_user(write.outputs[0])
        if attention is None:
            continue
        k_rotary = made_by(k_rotated, "rotary")
        q_rotary = made_by(attention.inputs[0], "rotary")
        if k_rotary is None or q_rotary is None or k_rotary.inputs[1] is not q_rotary.inputs[1]:
            continue
        q_norm, k_norm = (made_by(node.inputs[0], "rms_norm") for node in (q_rotary, k_rotary))
        if (q_norm is None) != (k_norm is None):
            continue
        (q, q_weight, eps), (k, k_weight, _) = map(_unwrap, (q_rotary, k_rotary), (q_norm, k_norm))
        new = plugin_node(
            "rope_kv_write",
            [q, k, v, k_rotary.inputs[1], q_weight, k_weight, positions, query_start, block_tables],
            {"layer": write.attributes["layer"].as_int(), "eps": eps},
            outputs=2,
        )
        old = [node for node in (q_norm, k_norm, q_rotary, k_rotary, write) if node is not None]
        old_values = [q_rotary.outputs[0], write.outputs[0]]
        replace(step.graph, write, old, [new], old_values, new.outputs)


def _unwrap(
    rotary: ir.Node, norm: ir.Node | None
) -> tuple[ir.Value | None, ir.Value | None, float]:
    """What the rotary's head norm reads, its weight and its eps; or the rotary's own input."""
    if norm is None:
        return rotary.inputs[0], None, 0.0
    return norm.inputs[0], norm.inputs[1], norm.attributes["eps"].as_float()
