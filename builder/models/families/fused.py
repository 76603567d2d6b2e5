"""Projections that checkpoints store fused or transposed."""

from collections.abc import Callable

import numpy as np

from llmbuild.builder.models.config import DecoderConfig
from llmbuild.builder.models.families.family import Part, Shape, Source, Tensor

Split = Callable[[Tensor, DecoderConfig], tuple[Tensor, Tensor, Tensor]]


def in_thirds(fused: Tensor, config: DecoderConfig) -> tuple[Tensor, Tensor, Tensor]:
    """All rows of Q, then those of K, then those of V."""
    q_end, k_end = config.q_size, config.q_size + config.kv_size
    return fused[:q_end], fused[q_end:k_end], fused[k_end:]


def by_kv_head(fused: Tensor, config: DecoderConfig) -> tuple[Tensor, Tensor, Tensor]:
    """For each KV head the query heads that share it, then its key, then its value:
    [kv_heads, group + 2, head_dim, ...]."""
    group, rest = config.num_heads // config.num_kv_heads, fused.shape[1:]
    heads = fused.reshape(config.num_kv_heads, group + 2, config.head_dim, *rest)
    q, k, v = heads[:, :group], heads[:, group], heads[:, group + 1]
    return q.reshape(-1, *rest), k.reshape(-1, *rest), v.reshape(-1, *rest)


def qkv_parts(module: str, split: Split, *, transposed: bool = False) -> dict[str, Source]:
    """Names of a layer's Q, K and V, weights and biases, as parts of the stored `module` (a
    template). transposed: weights are stored [in, out]."""

    def part(index: int, kind: str) -> Part:
        flip = transposed and kind == "weight"

        def shape(config: DecoderConfig) -> Shape:
            rows, hidden = config.q_size + 2 * config.kv_size, config.hidden_size
            if kind == "bias":
                return (rows,)
            return (hidden, rows) if flip else (rows, hidden)

        def take(stored: Tensor, config: DecoderConfig) -> Tensor:
            return np.ascontiguousarray(split(stored.T if flip else stored, config)[index])

        return Part(f"{module}.{kind}", shape, take)

    return {
        f"layers.{{l}}.attention.{name}_proj.{kind}": part(index, kind)
        for index, name in enumerate("qkv")
        for kind in ("weight", "bias")
    }


def gate_up_parts(template: str) -> dict[str, Source]:
    """Names of an MLP's gate and up projections, as the upper and lower half of a stored matrix."""

    def shape(config: DecoderConfig) -> Shape:
        return 2 * config.intermediate_size, config.hidden_size

    def gate(stored: Tensor, config: DecoderConfig) -> Tensor:
        return stored[: config.intermediate_size]

    def up(stored: Tensor, config: DecoderConfig) -> Tensor:
        return stored[config.intermediate_size :]

    return {
        "layers.{l}.mlp.gate_proj.weight": Part(template, shape, gate),
        "layers.{l}.mlp.up_proj.weight": Part(template, shape, up),
    }


def transposed(
    name: str, module: str, shape: Callable[[DecoderConfig], Shape]
) -> dict[str, Source]:
    """The weight of a projection that is stored as [in, out], which is `shape`."""
    part = Part(f"{module}.weight", shape, lambda stored, _: np.ascontiguousarray(stored.T))
    return {f"{name}.weight": part}
