"""Where the reference ops find the KV pools, and what a pool of each dtype keeps of a value.

A step graph names a pool by its op's layer attribute, and whoever runs the graph binds the pools
around the run.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class LayerPools:
    """One layer's pools, each [blocks, num_kv_heads, block_size, head_dim], written in place.

    They hold what attention reads: numbers that the dtype of their head can express, not codes.
    k_dtypes, v_dtypes: of each head, a key of `ROUNDERS`; none where the tensors' own dtype,
    float32 or bfloat16, is that of all heads.
    """

    k: torch.Tensor
    v: torch.Tensor
    k_dtypes: Sequence[str] = ()
    v_dtypes: Sequence[str] = ()

    @classmethod
    def filled(
        cls,
        shape: tuple[int, int, int, int],
        k_dtypes: Sequence[str],
        v_dtypes: Sequence[str],
        value: float = 0.0,
    ) -> "LayerPools":
        """Pools of one value for heads of these dtypes."""
        assert len(k_dtypes) == len(v_dtypes) == shape[1]

        def pool(dtypes: Sequence[str]) -> torch.Tensor:
            is_bf16 = {*dtypes} == {"bf16"}
            return torch.full(shape, value, dtype=torch.bfloat16 if is_bf16 else torch.float32)

        return cls(pool(k_dtypes), pool(v_dtypes), k_dtypes, v_dtypes)


def kept(x: torch.Tensor, dtypes: Sequence[str]) -> torch.Tensor:
    """What pools of these dtypes, one a head, give back of x, fp32 [..., num_kv_heads, D]."""
    heads = [ROUNDERS[dtype](x[..., h, :]) for h, dtype in enumerate(dtypes)]
    return torch.stack(heads, dim=-2) if heads else x


def _bf16(x: torch.Tensor) -> torch.Tensor:
    return x.to(torch.bfloat16).float()


def _int8(x: torch.Tensor) -> torch.Tensor:
    """scale = the row's largest magnitude / 127; code = x * (127 / that magnitude), rounded to the
    nearest integer, ties to even, or 0 where that factor isn't finite, as in a row of zeros."""
    largest = x.abs().amax(-1, keepdim=True)
    inverse = 127 / largest
    codes = torch.where(inverse.isfinite(), torch.round(x * inverse), 0)
    return codes * (largest / 127)


def _int8_static(x: torch.Tensor) -> torch.Tensor:
    """code = x, rounded to the nearest integer, ties to even, none beyond 127; 0 for a NaN."""
    return torch.round(x).clamp(-127, 127).nan_to_num(0.0)


def _int4(x: torch.Tensor) -> torch.Tensor:
    """minimum, then scale = (largest - minimum) / 15 or 0 where that is negative, both rounded to
    bf16; code = (x - minimum) * (1 / scale), rounded to the nearest integer, ties to even, within
    0 and 15, or 0 where 1 / scale isn't finite. All is NaN where x, minimum or scale isn't finite.
    """
    minimum = _bf16(x.amin(-1, keepdim=True))
    scale = _bf16(((x.amax(-1, keepdim=True) - minimum) / 15).clamp(min=0))
    inverse = 1 / scale
    codes = torch.where(inverse.isfinite(), torch.round((x - minimum) * inverse).clamp(0, 15), 0)
    is_finite = x.isfinite().all(-1, keepdim=True) & minimum.isfinite() & scale.isfinite()
    return torch.where(is_finite, minimum + scale * codes, torch.nan)


def _fp8(x: torch.Tensor) -> torch.Tensor:
    """The nearest number of E4M3, ties to even; beyond the largest that one, NaN for an
    infinity."""
    return torch.where(x.isfinite(), x.to(torch.float8_e4m3fn).float(), torch.nan)


ROUNDERS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "fp32": lambda x: x,
    "bf16": _bf16,
    "int8": _int8,
    "int8-static": _int8_static,
    "int4": _int4,
    "fp8": _fp8,
}

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
