"""Channel scales of the KV cache become constants that a layer's KV write and attention read."""

from collections.abc import Mapping

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from llmbuild.builder.graph.passes.rewrite import add_constant, nodes_of
from llmbuild.builder.graph.step_graph import StepGraph

_FIRST_SLOT = {"kv_write": 5, "rope_kv_write": 9, "paged_attention": 7}  # of k_scale; v_scale next


def place_kv_scales(step: StepGraph, scales: Mapping[str, NDArray[np.float32]]) -> None:
    """Give each layer its scales, fp32 [num_kv_heads * head_dim], named `layers.{l}.k_scale` and
    `layers.{l}.v_scale`; a layer may have both, one or none."""
    left = dict(scales)
    values: dict[str, ir.Value] = {}
    for kind, slot in _FIRST_SLOT.items():
        for node in nodes_of(step.graph, kind):
            layer = node.attributes["layer"].as_int()
            for offset, name in enumerate((f"layers.{layer}.k_scale", f"layers.{layer}.v_scale")):
                if name not in scales:
                    continue
                if name not in values:
                    values[name] = add_constant(step, name, left.pop(name))
                if len(node.inputs) <= slot + offset:
                    node.resize_inputs(slot + offset + 1)
                node.replace_input_with(slot + offset, values[name])
    assert not left, f"{[*left]}: the graph has no such layer"
