"""Where the reference ops find the KV pools: a step graph names a pool by its op's layer
attribute, and whoever runs the graph binds the pools around the run."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class LayerPools:
    """One layer's pools, each [blocks, num_kv_heads, block_size, head_dim], written in place.

    A pool of int8 codes has its scales beside it, fp32 [blocks, num_kv_heads, block_size]: an
    element is code * scale.
    """

    k: torch.Tensor
    v: torch.Tensor
    k_scale: torch.Tensor | None = None
    v_scale: torch.Tensor | None = None

    @classmethod
    def filled(
        cls,
        shape: tuple[int, int, int, int],
        k_dtype: torch.dtype,
        v_dtype: torch.dtype,
        value: float = 0.0,
    ) -> "LayerPools":
        """Pools of one value; where they are quantised the scales have it, and every code is 1."""

        def pool(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor | None]:
            if dtype == torch.int8:
                return torch.ones(shape, dtype=dtype), torch.full(shape[:-1], value)
            return torch.full(shape, value, dtype=dtype), None

        (k, k_scale), (v, v_scale) = pool(k_dtype), pool(v_dtype)
        return cls(k, v, k_scale, v_scale)


def quantise_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes, int8 like x, and scales, fp32 [...], of the rows of x, fp32 [..., D].

    scale = the row's largest magnitude / 127; code = x * (127 / that magnitude), rounded to the
    nearest integer, ties to even, or 0 where that factor isn't finite, as in a row of zeros.
    """
    largest = x.abs().amax(-1)
    inverse = 127 / largest
    inverse = torch.where(inverse.isfinite(), inverse, 0)
    return torch.round(x * inverse[..., None]).to(torch.int8), largest / 127


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
