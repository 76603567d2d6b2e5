"""How much of the model's output each part's precision costs: one part is changed at a time.

The calibration tokens go through the step graph in torch. Where the first node that a change
touches is reached, the rest of the graph runs once more with the change, from the values that are
there: what comes before isn't run again, and no more than one point's values are held.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import onnx_ir as ir
import torch
from numpy.typing import NDArray

from llmbuild.builder.calibration.batch import calibration_batch, fp32_pools, pools_of
from llmbuild.builder.graph.passes.kv_scales import place_kv_scales
from llmbuild.builder.graph.passes.rewrite import LINEARS
from llmbuild.builder.graph.reference import Values, running
from llmbuild.builder.graph.step_graph import StepGraph
from llmbuild.builder.models.config import DecoderConfig
from llmbuild.plugins.common.kv_pools import LayerPools, bind_kv_pools
from llmbuild.plugins.common.quantised import round_to_int8
from llmbuild.plugins.moe.op import moe_linear
from llmbuild.quant.evaluation.likelihood import mean_kl
from llmbuild.quant.plan import QuantPlan
from llmbuild.runtime.batch import StepBatch
from llmbuild.runtime.manifest import KVLayout

Read = Callable[[str], NDArray[np.generic]]

_NOT_RUN = torch.empty(0)


class Change(Protocol):
    """What is other than in the model as it is."""

    def touches(self, node: ir.Node) -> bool:
        """Whether the node gives something else."""
        ...

    def pools(self, config: DecoderConfig, shape: tuple[int, ...]) -> list[LayerPools]:
        """KV pools for a batch of [sequences, length] tokens."""
        ...

    def put(self, node: ir.Node, values: Values) -> None:
        """Put in what the node is to find, or what it gives."""
        ...


@dataclass(frozen=True)
class KVChange:
    """A KV cache whose layers aren't all in fp32; for a step with neutral scales (see
    `with_neutral_kv_scales`). scales: channel scales, as `quant.kv.channel_scales` names them."""

    kv: KVLayout
    scales: Mapping[str, NDArray[np.float32]]

    def touches(self, node: ir.Node) -> bool:
        if node.op_type != "kv_write":
            return False
        layer = self.kv.layers[node.attributes["layer"].as_int()]
        return {*layer.k_dtypes, *layer.v_dtypes} != {"fp32"}

    def pools(self, config: DecoderConfig, shape: tuple[int, ...]) -> list[LayerPools]:
        return pools_of(self.kv, shape)

    def put(self, node: ir.Node, values: Values) -> None:
        for value in node.inputs:
            scale = None if value is None else self.scales.get(str(value.name))
            if value is not None and scale is not None:
                values[value] = torch.from_numpy(scale)


@dataclass(frozen=True)
class WeightChange:
    """Matrices on the plan's grids, and activations that meet them rounded as it says.

    read: gives all tensors as values, these as their grids have them.
    """

    plan: QuantPlan
    read: Read

    def touches(self, node: ir.Node) -> bool:
        return any(value is not None and value.name in self.plan.weights for value in node.inputs)

    def pools(self, config: DecoderConfig, shape: tuple[int, ...]) -> list[LayerPools]:
        return fp32_pools(config, shape)

    def put(self, node: ir.Node, values: Values) -> None:
        if not self.touches(node):
            return
        for value in node.inputs:
            if value is not None and value.name in self.plan.weights and value not in values:
                values[value] = self._tensor(value)
        if node.op_type not in LINEARS:
            return
        x, weight, *rest = node.inputs
        assert x is not None
        assert weight is not None
        group = self.plan.activation_groups.get(str(weight.name))
        if group is None:
            return
        rounded = round_to_int8(values[x], group)
        if node.op_type == "moe_linear":
            (starts,) = rest
            assert starts is not None
            values[node.outputs[0]] = moe_linear(rounded, values[weight], values[starts])
        else:
            bias = self._tensor(rest[0]) if rest and rest[0] is not None else None
            values[node.outputs[0]] = torch.nn.functional.linear(rounded, values[weight], bias)

    def _tensor(self, value: ir.Value) -> torch.Tensor:
        return torch.from_numpy(self.read(str(value.name)).astype(np.float32, copy=False))


def with_neutral_kv_scales(step: StepGraph, config: DecoderConfig) -> StepGraph:
    """The step, in place, with a channel scale of 1 for all K and V, which alters no value."""
    ones = np.ones(config.kv_size, np.float32)
    names = [f"layers.{layer}.{part}_scale" for layer in range(config.num_layers) for part in "kv"]
    place_kv_scales(step, dict.fromkeys(names, ones))
    return step


def measure_changes(
    step: StepGraph,
    config: DecoderConfig,
    read: Read,
    tokens: NDArray[np.int32],
    scored: int,
    changes: Sequence[Change],
    advance: Callable[[int], None],
) -> list[float]:
    """Each change's mean KL(logits as they are || logits with it), nats a token, infinite where
    logits aren't finite.

    step: as traced in fp32, before any pass. read: gives tensors as values. tokens: [sequences,
    length], of which the last `scored` of each sequence count. advance: called with 1 after each.
    """
    batch = calibration_batch(tokens, min(scored, tokens.shape[1]))
    pools = fp32_pools(config, tokens.shape)
    found = [0.0] * len(changes)
    waiting = dict(enumerate(changes))
    with bind_kv_pools(pools), torch.no_grad():
        for _, last in running(step, read, batch):
            values = last
        reference = values[step.graph.outputs[0]].numpy()
        for node, values in running(step, read, batch):
            begun = [index for index, change in waiting.items() if change.touches(node)]
            for index in begun:
                change = waiting.pop(index)
                with bind_kv_pools(change.pools(config, tokens.shape)):
                    logits = _logits_from(node, values, step, read, batch, change)
                found[index] = mean_kl(reference, logits)
                advance(1)
            if not waiting:
                break
    assert not waiting, "a change touches nothing"
    return found


def _logits_from(
    start: ir.Node, known: Values, step: StepGraph, read: Read, batch: StepBatch, change: Change
) -> NDArray[np.float32]:
    """The logits when all from the node `start` on is run with the change. known: the values that
    are needed there."""
    known = dict(known)
    has_begun = False
    for node, values in running(step, read, batch):
        if node is start:
            values.update(known)
            known.clear()  # so that each value is dropped with its last reader
            has_begun = True
        if has_begun:
            change.put(node, values)
        else:
            values[node.outputs[0]] = _NOT_RUN
    return values[step.graph.outputs[0]].numpy()


def keeping(read: Read, limit_bytes: int) -> Read:
    """The same tensors, of which those that are read first are kept up to a limit together."""
    kept: dict[str, NDArray[np.generic]] = {}

    def read_once(name: str) -> NDArray[np.generic]:
        if name in kept:
            return kept[name]
        tensor = read(name)
        if sum(each.nbytes for each in kept.values()) + tensor.nbytes <= limit_bytes:
            kept[name] = tensor
        return tensor

    return read_once
