"""Runs Triton kernels on CPU tensors through Triton's interpreter, on steps and KV pools as a GPU
has them. Import this before a module with kernels."""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import numpy as np
import torch
from kernel_harness import Step, make_step
from numpy.typing import NDArray

from llmbuild.plugins.common.kernel_variant import KernelVariant
from llmbuild.plugins.common.kv_pools import ROUNDERS

os.environ["TRITON_INTERPRET"] = "1"  # read where a kernel is defined
triton = import_module("triton")
assert not isinstance(triton.language.sum, triton.JITFunction), (
    "torch has imported Triton already: set TRITON_INTERPRET=1 before that"
)

KV_DTYPES = ("fp32", "fp16", "bf16", "int8", "int8-static", "fp8", "int4")
_ITEMS = {
    "fp32": torch.float32,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "int8": torch.int8,
    "int8-static": torch.int8,
}
FP8_LARGEST = 448.0


# What a kernel's signature calls a tensor's items; fp8 may be bytes.
_ITEM_TYPES = {
    "*fp32": torch.float32,
    "*fp16": torch.float16,
    "*bf16": torch.bfloat16,
    "*i8": torch.int8,
    "*i32": torch.int32,
    "*i64": torch.int64,
    "*u8": torch.uint8,
}


def launch(kernel: Any, grid: tuple[int, ...], /, **arguments: Any) -> None:
    """Run a kernel over a grid; arrays may be numpy's or torch's, and are written in place. kernel:
    a Triton function, or a variant that is built, whose constants then replace those given."""
    arguments = {name: as_argument(value) for name, value in arguments.items()}
    if isinstance(kernel, KernelVariant):
        arguments |= kernel.constants
        for name, kind in kernel.signature.items():
            is_tensor = isinstance(arguments[name], torch.Tensor)
            assert is_tensor == kind.startswith("*"), name
            assert not is_tensor or arguments[name].dtype == _ITEM_TYPES[kind], name
        kernel = kernel.kernel
    kernel[grid](**arguments)


def as_argument(value: Any) -> Any:
    """A launch argument: an array as a contiguous tensor of the same memory."""
    if isinstance(value, np.ndarray):
        value = torch.from_numpy(value)
    if isinstance(value, torch.Tensor):
        assert value.is_contiguous()
    return value


def step_tensors(step: Step) -> dict[str, torch.Tensor]:
    """positions, query_start, kv_lengths and block_tables by name."""
    return {name: torch.from_numpy(array) for name, array in vars(step).items()}


def pad_step(step: Step, sequences: int) -> Step:
    """The step with more sequences, which have no tokens and length 0."""
    more = sequences
    width = step.block_tables.shape[1]
    return Step(
        positions=step.positions,
        query_start=np.append(step.query_start, np.repeat(step.query_start[-1:], more)),
        kv_lengths=np.append(step.kv_lengths, np.zeros(more, np.int32)),
        block_tables=np.append(step.block_tables, np.zeros((more, width), np.int32), axis=0),
    )


def _fp8(x: torch.Tensor) -> torch.Tensor:
    """The nearest e4m3 number, ties to even; beyond the largest the largest, NaN for infinity."""
    codes = x.clamp(-FP8_LARGEST, FP8_LARGEST).to(torch.float8_e4m3fn)
    return torch.where(x.isfinite(), codes.float(), torch.nan)


# What a pool keeps of a row, fp32 [..., D].
GPU_ROUNDERS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    **ROUNDERS,
    "fp16": lambda x: x.half().float(),
    "fp8": _fp8,
}


@dataclass
class GpuPool:
    """K or V of a layer: items [blocks, Hkv, block_size, D], or D / 2 bytes for int4, and scales
    and minima [blocks, Hkv, block_size] where the dtype has them."""

    dtype: str
    items: torch.Tensor
    scales: torch.Tensor | None = None
    minima: torch.Tensor | None = None

    @classmethod
    def random(cls, dtype: str, shape: Sequence[int], rng: np.random.Generator) -> "GpuPool":
        """Elements of about 1, and of about 40 for static codes."""

        def numbers(low: float, high: float, of: Sequence[int]) -> torch.Tensor:
            return torch.from_numpy(rng.uniform(low, high, of)).float()

        def integers(low: int, high: int, of: Sequence[int]) -> torch.Tensor:
            return torch.from_numpy(rng.integers(low, high, of))

        rows = shape[:-1]
        if dtype == "int4":
            items = integers(0, 256, (*rows, shape[-1] // 2)).to(torch.uint8)
            return cls(
                dtype, items, numbers(0.05, 0.3, rows).bfloat16(), numbers(-2, 0, rows).bfloat16()
            )
        if dtype == "int8":
            return cls(dtype, integers(-127, 128, shape).to(torch.int8), numbers(0.01, 0.03, rows))
        if dtype == "int8-static":
            return cls(dtype, integers(-80, 81, shape).to(torch.int8))
        elements = torch.from_numpy(rng.standard_normal(shape)).float()
        if dtype == "fp8":
            return cls(dtype, elements.to(torch.float8_e4m3fn).view(torch.uint8))
        return cls(dtype, elements.to(_ITEMS[dtype]))

    @property
    def elements(self) -> torch.Tensor:
        """What attention reads, fp32 [blocks, Hkv, block_size, D]."""
        if self.dtype == "fp8":
            return self.items.view(torch.float8_e4m3fn).float()
        if self.dtype == "int4":
            assert self.scales is not None
            assert self.minima is not None
            codes = torch.stack((self.items & 15, self.items >> 4), dim=-1).flatten(-2).float()
            return self.minima.float()[..., None] + codes * self.scales.float()[..., None]
        codes = self.items.float()
        return codes if self.scales is None else codes * self.scales[..., None]

    @property
    def parts(self) -> list[torch.Tensor]:
        return [part for part in (self.items, self.scales, self.minima) if part is not None]

    def clone(self) -> "GpuPool":
        parts = (self.items, self.scales, self.minima)
        return GpuPool(self.dtype, *(None if part is None else part.clone() for part in parts))

    def arguments(self, of: str) -> dict[str, torch.Tensor | None]:
        """The pool's launch arguments as `of`, "k" or "v": k_items, k_scales, k_minima."""
        return {f"{of}_{name}": getattr(self, name) for name in ("items", "scales", "minima")}


def random_pools(
    sequences: Sequence[tuple[int, int]],
    dtypes: tuple[str, str],
    num_kv_heads: int,
    head_dim: int,
    block_size: int,
    rng: np.random.Generator,
) -> tuple[Step, GpuPool, GpuPool]:
    """A step of (computed, new) tokens over shuffled blocks, and pools of K and V full of
    numbers, whether their slots belong to a sequence or not."""
    step, num_blocks = make_step(sequences, block_size, rng)
    shape = (num_blocks, num_kv_heads, block_size, head_dim)
    k, v = (GpuPool.random(dtype, shape, rng) for dtype in dtypes)
    return step, k, v


def raw_bytes(pool: GpuPool) -> list[NDArray[np.uint8]]:
    """The bytes of a pool's parts, each [blocks, Hkv, block_size, bytes of a token]."""
    parts = (part if part.dim() == 4 else part[..., None] for part in pool.parts)
    return [part.contiguous().view(torch.uint8).numpy().copy() for part in parts]
