"""Lower a step graph to a network with our plugins, over paged KV pools. Needs Triton."""

from typing import Any

from llmbuild.builder.graph.materialise import ReadTensor
from llmbuild.builder.graph.step_graph import OUTPUT, StepGraph
from llmbuild.builder.models.config import DecoderConfig
from llmbuild.builder.targets.tensorrt import plugin_attention, plugin_nodes
from llmbuild.builder.targets.tensorrt.limits import (
    HIDDEN,
    LOGIT_ROWS,
    TOKEN_IDS,
    ActivationDtype,
)
from llmbuild.builder.targets.tensorrt.operations import COMMON, Operations, lower_nodes
from llmbuild.builder.targets.tensorrt.paged_limits import (
    INPUT_SIZES,
    PagedLimits,
)
from llmbuild.builder.targets.tensorrt.plugin_lowering import Instantiate, PluginLowering
from llmbuild.plugins.registry import DOMAIN
from llmbuild.runtime.manifest import pool_name

OPERATIONS: Operations[PluginLowering] = {
    **COMMON,
    (DOMAIN, "gated_activation"): plugin_nodes.gated_activation,
    (DOMAIN, "quantised_linear"): plugin_nodes.quantised_linear,
    (DOMAIN, "rms_norm"): plugin_nodes.rms_norm,
    (DOMAIN, "add_rms_norm"): plugin_nodes.add_rms_norm,
    (DOMAIN, "layer_norm"): plugin_nodes.layer_norm,
    (DOMAIN, "gather_quantised_rows"): plugin_nodes.gather_quantised_rows,
    (DOMAIN, "rope_table"): plugin_attention.rope_table,
    (DOMAIN, "switched_rope_table"): plugin_attention.unable_rope_table,
    (DOMAIN, "dynamic_rope_table"): plugin_attention.unable_rope_table,
    (DOMAIN, "rope_kv_write"): plugin_attention.rope_kv_write,
    (DOMAIN, "paged_attention"): plugin_attention.paged_attention,
}


def lower_paged(
    trt: Any,
    network: Any,
    step: StepGraph,
    config: DecoderConfig,
    limits: PagedLimits,
    activations: ActivationDtype,
    read: ReadTensor,
    instantiate: Instantiate,
) -> PluginLowering:
    """Fill an empty, strongly typed network, as `lower` does. What is returned holds the weights,
    which have to live until the plan is built, and names the plugins."""
    lowering = PluginLowering(trt, network, step, config, limits, activations, read, instantiate)
    _add_inputs(lowering)
    lower_nodes(lowering, OPERATIONS)
    lowering.mark_result()
    return lowering


def _add_inputs(lowering: PluginLowering) -> None:
    step, trt = lowering.step, lowering.trt
    idle = {TOKEN_IDS} if HIDDEN in step.inputs else set()  # what a stage isn't asked for
    idle |= {LOGIT_ROWS} if step.output != OUTPUT else set()
    for name, sizes in INPUT_SIZES.items():
        if name == HIDDEN and name in step.inputs:
            lowering.add_input(name, lowering.act, *sizes, lowering.config.hidden_size)
        elif name in step.inputs and name not in idle:
            lowering.add_input(name, trt.int32, *sizes)
    for value in step.graph.inputs:
        if str(value.name) in lowering.inputs:
            lowering.tensors[value] = lowering.inputs[str(value.name)]
    for node in step.graph:
        if node.op_type == "rope_kv_write":
            layer = node.attributes["layer"].as_int()
            dtypes = plugin_attention.kv_dtypes(lowering, node, layer)
            for tensor in plugin_attention.pool_tensors(lowering, *dtypes):
                lowering.add_input(pool_name(layer, tensor), trt.int64, 1)
