"""What is launched, on which data, and what torch does in its place."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from math import prod

import torch

from llmbuild.plugins.common.kernel_variant import KernelVariant

TORCH_TYPES = {
    "*fp32": torch.float32,
    "*fp16": torch.float16,
    "*bf16": torch.bfloat16,
    "*i8": torch.int8,
    "*u8": torch.uint8,
    "*i32": torch.int32,
    "*i64": torch.int64,
}
PATTERN_ITEMS = (1 << 20) + 7  # of large random data, which repeats itself after as many

Tensors = Mapping[str, torch.Tensor]
Results = tuple[torch.Tensor, ...]


@dataclass(frozen=True)
class Buffer:
    """Memory that kernels read or write: `values`, one after the other and again from the start."""

    values: torch.Tensor
    shape: tuple[int, ...]

    @property
    def size_bytes(self) -> int:
        return prod(self.shape) * self.values.itemsize

    @property
    def pattern(self) -> bytes:
        flat = self.values.flatten()[: prod(self.shape)].contiguous()
        return flat.view(torch.uint8).numpy().tobytes()

    def host(self) -> torch.Tensor:
        """All of it, in this process' memory."""
        count = prod(self.shape)
        flat = self.values.flatten()
        return flat.repeat(-(-count // len(flat)))[:count].reshape(self.shape)


def given(values: torch.Tensor) -> Buffer:
    """Of these values."""
    return Buffer(values.contiguous(), tuple(values.shape))


def normal(dtype: torch.dtype, *shape: int, scale: float = 1.0) -> Buffer:
    return Buffer(_normal(dtype, min(prod(shape), PATTERN_ITEMS), scale), shape)


def uniform(dtype: torch.dtype, low: float, high: float, *shape: int) -> Buffer:
    """Integers: high is left out."""
    return Buffer(_uniform(dtype, min(prod(shape), PATTERN_ITEMS), low, high), shape)


@cache  # many cases have the same
def _normal(dtype: torch.dtype, count: int, scale: float) -> torch.Tensor:
    generator = torch.Generator().manual_seed(count)
    return (scale * torch.randn(count, generator=generator)).to(dtype)


@cache
def _uniform(dtype: torch.dtype, count: int, low: float, high: float) -> torch.Tensor:
    generator = torch.Generator().manual_seed(count)
    numbers = low + (high - low) * torch.rand(count, generator=generator)
    return (numbers if dtype.is_floating_point else numbers.floor()).to(dtype)


def empty(dtype: torch.dtype, *shape: int) -> Buffer:
    """What a kernel is to write: -1 everywhere."""
    return Buffer(torch.full((1,), -1).to(dtype), shape)


@dataclass(frozen=True)
class Launch:
    """arguments: of the kernel's, which buffer or integer each is."""

    variant: KernelVariant
    grid: tuple[int, ...]
    arguments: Mapping[str, str | int]


@dataclass(frozen=True)
class Case:
    """Kernels that follow each other, and what they are to give.

    results: buffers. moved_bytes: from and to memory at least. competitor: prepares torch's way on
    the same data, on whichever device that lies, and gives the function of the same results that
    is checked against and timed.
    """

    kernel: str
    what: str
    rows: int
    context: int
    buffers: Mapping[str, Buffer]
    launches: list[Launch]
    results: tuple[str, ...]
    moved_bytes: int
    competitor: Callable[[Tensors], Callable[[], Results]] = field(repr=False)
    tolerance: float = 0.02  # of the largest; results of fp16 and bf16

    @property
    def size_bytes(self) -> int:
        return sum(buffer.size_bytes for buffer in self.buffers.values())

    @property
    def name(self) -> str:
        context = f", context {self.context}" if self.context else ""
        return f"{self.kernel} {self.what}, {self.rows} rows{context}"


def wrong(got: Results, want: Results, tolerance: float) -> str:
    """How results differ, or nothing."""
    found = (_wrong(*each, tolerance) for each in zip(got, want, strict=True))
    return "; ".join(filter(None, found))


def _wrong(got: torch.Tensor, want: torch.Tensor, tolerance: float) -> str:
    got, want = got.double(), want.double().reshape(got.shape)
    if not bool(got.isfinite().all()):
        return "has what is no number"
    allowed = tolerance * float(want.abs().max())
    largest = float((got - want).abs().max())
    return "" if largest <= allowed else f"differs by {largest:.3g}, of {allowed:.3g} allowed"
