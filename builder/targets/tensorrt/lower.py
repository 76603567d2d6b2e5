"""Lower a step graph to a TensorRT network: one function for each operation, found by name."""

from collections.abc import Callable
from typing import Any

import onnx_ir as ir

from llmbuild.builder.graph.materialise import ReadTensor
from llmbuild.builder.graph.step_graph import OUTPUT, StepGraph
from llmbuild.builder.models.config import DecoderConfig
from llmbuild.builder.targets.tensorrt import (
    attention,
    collectives,
    elementwise,
    linears,
    norms,
    tables,
)
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
from llmbuild.errors import BuildError
from llmbuild.plugins.registry import DOMAIN

_LOWER: dict[tuple[str, str], Callable[[Lowering, ir.Node], None]] = {
    ("", "Constant"): elementwise.constant,
    ("", "Split"): elementwise.split,
    **{("", name): elementwise.arithmetic for name in elementwise.ARITHMETIC},
    **{("", name): elementwise.function for name in elementwise.FUNCTIONS},
    (DOMAIN, "activation"): elementwise.activation,
    (DOMAIN, "gated_activation"): elementwise.gated_activation,
    (DOMAIN, "linear"): linears.linear,
    (DOMAIN, "quantised_linear"): linears.quantised_linear,
    (DOMAIN, "rms_norm"): norms.rms_norm,
    (DOMAIN, "add_rms_norm"): norms.add_rms_norm,
    (DOMAIN, "layer_norm"): norms.layer_norm,
    (DOMAIN, "gather_rows"): tables.gather_rows,
    (DOMAIN, "gather_quantised_rows"): tables.gather_quantised_rows,
    (DOMAIN, "rope_table"): attention.rope_table,
    (DOMAIN, "switched_rope_table"): attention.unable_rope_table,
    (DOMAIN, "dynamic_rope_table"): attention.unable_rope_table,
    (DOMAIN, "rope_kv_write"): attention.rope_kv_write,
    (DOMAIN, "paged_attention"): attention.paged_attention,
    (DOMAIN, "all_reduce"): collectives.all_reduce,
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
    for node in step.graph:
        lower_node = _LOWER.get((node.domain, node.op_type))
        if lower_node is None:
            raise BuildError(
                f"the tensorrt-rtx target has no implementation of {node.domain or 'ai.onnx'}::"
                f"{node.op_type}, which makes {node.outputs[0].name!r}; it implements "
                f"{', '.join(sorted(name for _, name in _LOWER))}"
            )
        lowering.begin(node)
        lower_node(lowering, node)
    _mark_outputs(lowering)
    return lowering


def _add_inputs(lowering: Lowering) -> None:
    """The network's inputs, and what stands for those of the step graph that a node may read.
    Sizes of one name are equal."""
    step, config = lowering.step, lowering.config
    names = [POSITIONS, KV_LENGTHS, WRITE_INDICES]
    names += [TOKEN_IDS] if HIDDEN not in step.inputs else []
    names += [LOGIT_ROWS] if step.output == OUTPUT else []
    sizes = {TOKEN_IDS: "BL", POSITIONS: "BL", LOGIT_ROWS: "R"}
    for name in names:
        _add_input(lowering, name, lowering.trt.int32, *sizes.get(name, "B"))
    if HIDDEN in step.inputs:
        _add_input(lowering, HIDDEN, lowering.act, "T", config.hidden_size)
    for layer in range(config.num_layers):
        for kind in "kv":
            shape = ("B", config.num_kv_heads, lowering.limits.capacity, config.head_dim)
            _add_input(lowering, cache_name(layer, kind), lowering.act, *shape)
    for value in step.graph.inputs:
        tensor = lowering.inputs.get(str(value.name))
        if tensor is not None:
            is_per_token = value.name in (TOKEN_IDS, POSITIONS)
            lowering.tensors[value] = lowering.reshape(tensor, -1) if is_per_token else tensor


def _add_input(lowering: Lowering, name: str, dtype: Any, *shape: int | str) -> None:
    sizes = tuple(-1 if isinstance(size, str) else size for size in shape)
    tensor = lowering.network.add_input(name, dtype, sizes)
    for axis, size in enumerate(shape):
        if isinstance(size, str):
            tensor.set_dimension_name(axis, size)
    lowering.inputs[name] = tensor


def _mark_outputs(lowering: Lowering) -> None:
    """Logits are fp32; what the next stage reads keeps the activations' dtype."""
    result = lowering.tensor(lowering.step.graph.outputs[0])
    if lowering.step.output == OUTPUT:
        result = lowering.cast(result, lowering.trt.float32)
    _mark(lowering, result, lowering.step.output)
    for (layer, kind), cache in lowering.caches.items():
        _mark(lowering, cache, updated_name(layer, kind))


def _mark(lowering: Lowering, tensor: Any, name: str) -> None:
    tensor.name = name
    lowering.network.mark_output(tensor)
