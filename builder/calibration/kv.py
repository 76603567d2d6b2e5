"""Channel scales of the KV cache: how far each channel of K and V reaches on the calibration
tokens."""

from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray

from llmbuild.builder.calibration.batch import calibration_batch, fp32_pools
from llmbuild.builder.graph.reference import running
from llmbuild.builder.graph.step_graph import StepGraph
from llmbuild.builder.models.config import NO_ROPE, DecoderConfig
from llmbuild.plugins.common.kv_pools import bind_kv_pools

Reaches = dict[str, NDArray[np.float32]]


def measure_reaches(
    step: StepGraph,
    config: DecoderConfig,
    read: Callable[[str], NDArray[np.generic]],
    tokens: NDArray[np.int32],
) -> Reaches:
    """The largest magnitude of each channel, fp32 [num_kv_heads, head_dim], of layers.L.k and
    layers.L.v. read: gives tensors as values. tokens: [sequences, length].

    The two elements of a rotary pair have that of their norm, which no rotation changes: it holds
    at positions that the tokens don't reach.
    """
    reaches: Reaches = {}
    with bind_kv_pools(fp32_pools(config, tokens.shape)), torch.no_grad():
        for node, values in running(step, read, calibration_batch(tokens)):
            if node.op_type != "kv_write":
                continue
            layer = node.attributes["layer"].as_int()
            k, v = (values[value] for value in node.inputs[:2] if value is not None)
            k, v = (x.unflatten(-1, (config.num_kv_heads, config.head_dim)) for x in (k, v))
            reaches[f"layers.{layer}.k"] = _pair_norms(k, config, layer).amax(0).numpy()
            reaches[f"layers.{layer}.v"] = v.abs().amax(0).numpy()
            if layer == config.num_layers - 1:
                break
    return reaches


def _pair_norms(k: torch.Tensor, config: DecoderConfig, layer: int) -> torch.Tensor:
    """Magnitudes of k [tokens, heads, head_dim] that hold whatever a token's position is."""
    rope = config.layer_ropes[layer]
    turning = 0 if rope == NO_ROPE else config.ropes[rope].rotary_dim
    low, high = k[..., : turning // 2], k[..., turning // 2 : turning]
    pairs = torch.hypot(low, high)
    return torch.cat((pairs, pairs, k[..., turning:].abs()), dim=-1)
