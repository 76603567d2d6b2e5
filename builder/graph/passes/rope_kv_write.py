"""QK-norm over heads, rotary and the KV write of a layer, in one node.

A layer without rotary (NoPE), or whose QK-norm isn't over heads, keeps what can't be fused before
the node.
"""

from dataclasses import dataclass

import onnx_ir as ir

from llmbuild.builder.graph.passes.rewrite import made_by, nodes_of, only_user, plugin_node, replace
from llmbuild.builder.graph.step_graph import StepGraph


def place_rope_kv_write(step: StepGraph) -> None:
    for write in nodes_of(step.graph, "kv_write"):
        attention = only_user(write.outputs[0])
        if attention is None or attention.op_type != "paged_attention":
            continue
        turned = attention.inputs[0]
        assert turned is not None
        q, k = _chain(turned, attention), _chain(write.inputs[0], write)
        if q.table is not k.table:
            continue
        if (q.weight is None) != (k.weight is None) or q.eps != k.eps:
            q, k = q.without_norm(), k.without_norm()
        _, v, positions, query_start, block_tables = write.inputs[:5]
        new = plugin_node(
            "rope_kv_write",
            [
                q.value,
                k.value,
                v,
                k.table,
                q.weight,
                k.weight,
                positions,
                query_start,
                block_tables,
            ],
            {"layer": write.attributes["layer"].as_int(), "eps": q.eps},
            outputs=2,
        )
        if q.table is not None:
            old = [*q.nodes, *k.nodes, write]
            replace(step.graph, write, old, [new], [turned, write.outputs[0]], new.outputs)
        else:  # nothing turns: attention reads Q through the new node, and only the write goes
            new.outputs[0].name = f"{turned.name}.written"
            new.outputs[0].shape, new.outputs[0].type = turned.shape, turned.type
            replace(step.graph, write, [write], [new], write.outputs, new.outputs[1:])
            attention.replace_input_with(0, new.outputs[0])


@dataclass(frozen=True)
class _Chain:
    """What happens to Q or K before attention sees it: value, then head norm, then rotary."""

    value: ir.Value | None
    table: ir.Value | None = None
    nodes: tuple[ir.Node, ...] = ()
    weight: ir.Value | None = None
    eps: float = 0.0

    def without_norm(self) -> "_Chain":
        """The chain with its norm left before it."""
        rotary = self.nodes[-1]
        return _Chain(rotary.inputs[0], self.table, (rotary,))


def _chain(value: ir.Value | None, reader: ir.Node) -> _Chain:
    """The rotary, and the norm over each head before it, of a value that only `reader` reads."""
    rotary = made_by(value, "rotary")
    if rotary is None or only_user(rotary.outputs[0]) is not reader:
        return _Chain(value)
    source, table = rotary.inputs
    norm = made_by(source, "rms_norm")
    if norm is None or only_user(norm.outputs[0]) is not rotary or not _per_head(norm, rotary):
        return _Chain(source, table, (rotary,))
    eps = norm.attributes["eps"].as_float()
    return _Chain(norm.inputs[0], table, (norm, rotary), norm.inputs[1], eps)


def _per_head(norm: ir.Node, rotary: ir.Node) -> bool:
    weight = norm.inputs[1]
    assert weight is not None
    assert weight.shape is not None
    return weight.shape[0] == rotary.attributes["head_dim"].as_int()
