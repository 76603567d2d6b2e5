"""QK-norm over heads, rotary and the KV write of a layer, in one node.

A layer without rotary (NoPE), or whose QK-norm isn't over heads, keeps what can't be fused before
the node.
"""

from dataclasses import dataclass

import onnx_ir as ir

from llmbuild.builder.graph.passes.rewrite import made_by, nodes_of, only_user, plugin_node, replace
from llmbuild.builder.graph.step_graph import StepGraph


@dataclass(frozen=True)
class _Chain:
    """What happens to Q or K before attention sees it: value, then norm, then rotary."""

    value: ir.Value | None
    weight: ir.Value | None
    table: ir.Value | None
    eps: float
    nodes: tuple[ir.Node, ...]


def place_rope_kv_write(step: StepGraph) -> None:
    for write in nodes_of(step.graph, "kv_write"):
        attention = only_user(write.outputs[0])
        if attention is None or attention.op_type != "paged_attention":
            continue
        turned = attention.inputs[0]
        assert turned is not None
        k_chain, q_chain = _chain(write.inputs[0], write), _chain(turned, attention)
        same_norm = (k_chain.weight is None) == (q_chain.weight is None)
        if k_chain.table is not q_chain.table or not same_norm:
            continue
        _, v, positions, query_start, block_tables = write.inputs
        norms = (q_chain.weight, k_chain.weight)
        inputs = [q_chain.value, k_chain.value, v, k_chain.table, *norms]
        new = plugin_node(
            "rope_kv_write",
            [*inputs, positions, query_start, block_tables],
            {"layer": write.attributes["layer"].as_int(), "eps": q_chain.eps},
            outputs=2,
        )
        if q_chain.nodes:
            old = [*q_chain.nodes, *k_chain.nodes, write]
            replace(step.graph, write, old, [new], [turned, write.outputs[0]], new.outputs)
        else:  # nothing to turn: attention goes on reading Q, and only the write is replaced
            new.outputs[0].shape, new.outputs[0].type = turned.shape, turned.type
            replace(step.graph, write, [write], [new], write.outputs, new.outputs[1:])
            attention.replace_input_with(0, new.outputs[0])


def _chain(value: ir.Value | None, reader: ir.Node) -> _Chain:
    """The rotary and the head norm that make a value which `reader` alone reads."""
    rotary = made_by(value, "rotary")
    if rotary is None or value is None or only_user(value) is not reader:
        return _Chain(value, None, None, 0.0, ())
    source, table = rotary.inputs
    norm = made_by(source, "rms_norm")
    if (
        norm is None
        or source is None
        or only_user(source) is not rotary
        or not _per_head(norm, rotary)
    ):
        return _Chain(source, None, table, 0.0, (rotary,))
    eps = norm.attributes["eps"].as_float()
    return _Chain(norm.inputs[0], norm.inputs[1], table, eps, (norm, rotary))


def _per_head(norm: ir.Node, rotary: ir.Node) -> bool:
    weight = norm.inputs[1]
    assert weight is not None
    assert weight.shape is not None
    return weight.shape[0] == rotary.attributes["head_dim"].as_int()
