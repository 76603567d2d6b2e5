"""Lower a step graph to a network of TensorRT's own layers, with linear KV caches."""

from typing import Any

from llmbuild.builder.graph.materialise import ReadTensor
from llmbuild.builder.graph.step_graph import OUTPUT, StepGraph
from llmbuild.builder.models.config import DecoderConfig
from llmbuild.builder.targets.tensorrt import attention, elementwise, linears, norms, tables
from llmbuild.builder.targets.tensorrt.limits import (
    HIDDEN,
    KV_LENGTHS,
    LOGIT_ROWS,
    POSITIONS,
    TOKEN_IDS,
    WRITE_INDICES,
    ActivationDtype,
    Limits,
    cache_name,
    updated_name,
)
from llmbuild.builder.targets.tensorrt.lowering import Lowering
from llmbuild.builder.targets.tensorrt.operations import COMMON, Operations, lower_nodes
from llmbuild.plugins.registry import DOMAIN

OPERATIONS: Operations[Lowering] = {
    **COMMON,
    (DOMAIN, "gated_activation"): elementwise.gated_activation,
    (DOMAIN, "quantised_linear"): linears.quantised_linear,
    (DOMAIN, "rms_norm"): norms.rms_norm,
    (DOMAIN, "add_rms_norm"): norms.add_rms_norm,
    (DOMAIN, "layer_norm"): norms.layer_norm,
    (DOMAIN, "gather_quantised_rows"): tables.gather_quantised_rows,
    (DOMAIN, "rope_table"): attention.rope_table,
    (DOMAIN, "switched_rope_table"): attention.unable_rope_table,
    (DOMAIN, "dynamic_rope_table"): attention.unable_rope_table,
    (DOMAIN, "rope_kv_write"): attention.rope_kv_write,
    (DOMAIN, "paged_attention"): attention.paged_attention,
}


def lower(
    trt: Any,
    network: Any,
    step: StepGraph,
    config: DecoderConfig,
    limits: Limits,
    activations: ActivationDtype,
    read: ReadTensor,
) -> Lowering:
    """Fill an empty, strongly typed network with a step graph that went through the passes.

    trt: the module that made the network. config: that of the graph's shard. read: gives canonical
    tensors, of which one is asked for at a time. What is returned holds the weights and has to
    live until the plan is built.

    Raises BuildError, naming the node, for what native layers can't express.
    """
    lowering = Lowering(trt, network, step, config, limits, activations, read)
    _add_inputs(lowering)
    lower_nodes(lowering, OPERATIONS)
    lowering.mark_result()
    for (layer, kind), cache in lowering.caches.items():
        lowering.mark_output(cache, updated_name(layer, kind))
    return lowering


def _add_inputs(lowering: Lowering) -> None:
    """The network's inputs, and what stands for those of the step graph that a node may read."""
    step, config = lowering.step, lowering.config
    names = [POSITIONS, KV_LENGTHS, WRITE_INDICES]
    names += [TOKEN_IDS] if HIDDEN not in step.inputs else []
    names += [LOGIT_ROWS] if step.output == OUTPUT else []
    sizes = {TOKEN_IDS: "BL", POSITIONS: "BL", LOGIT_ROWS: "R"}
    for name in names:
        lowering.add_input(name, lowering.trt.int32, *sizes.get(name, "B"))
    if HIDDEN in step.inputs:
        lowering.add_input(HIDDEN, lowering.act, "T", config.hidden_size)
    for layer in range(config.num_layers):
        for kind in "kv":
            shape = ("B", config.num_kv_heads, lowering.limits.capacity, config.head_dim)
            lowering.add_input(cache_name(layer, kind), lowering.act, *shape)
    for value in step.graph.inputs:
        tensor = lowering.inputs.get(str(value.name))
        if tensor is not None:
            is_per_token = value.name in (TOKEN_IDS, POSITIONS)
            lowering.tensors[value] = lowering.reshape(tensor, -1) if is_per_token else tensor
