"""Where the reference ops find the KV pools: a step graph names a pool by its op's layer
attribute, and whoever runs the graph binds the pools around the run."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class LayerPools:
    """One layer's pools, each [blocks, num_kv_heads, block_size, head_dim], written in place."""

    k: torch.Tensor
    v: torch.Tensor


_bound: ContextVar[Sequence[LayerPools]] = ContextVar("llmbuild_kv_pools")


@contextmanager
def bind_kv_pools(pools: Sequence[LayerPools]) -> Iterator[None]:
    """Bind the pools of every layer, in layer order, for the ops called inside."""
    token = _bound.set(pools)
    try:
        yield
    finally:
        _bound.reset(token)


def layer_pools(layer: int) -> LayerPools:
    """The pools bound for a layer. Raises LookupError outside `bind_kv_pools`."""
    return _bound.get()[layer]
