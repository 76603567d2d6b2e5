"""Triton kernels as TensorRT plugins: what follows from the shapes of a plugin's inputs.

A quick-deploy plugin passes its kernel the inputs, then integers that follow from their shapes,
then the outputs. Sizes are ints, or symbols that have +, -, * and // with ints and with each other
on their right: TensorRT's when it builds an engine.
"""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from llmbuild.plugins.common.kernel_variant import KernelVariant

Size = Any
Sizes = Sequence[Size]
Shapes = Mapping[str, Sizes]  # of tensors by name

# What TensorRT calls the types of kernels' tensors. It knows no uint8 in plugins, and the bytes of
# codes and of e4m3 numbers are no one's but the kernels'.
TENSOR_DTYPES = {
    "*fp32": "float32",
    "*fp16": "float16",
    "*bf16": "bfloat16",
    "*i64": "int64",
    "*i32": "int32",
    "*i8": "int8",
    "*u8": "int8",
    "*fp8e4nv": "int8",
}


def ceil_div(size: Size, divisor: int) -> Size:
    return (size + (divisor - 1)) // divisor


@dataclass(frozen=True)
class Launch:
    """grid: programs along up to three axes. integers: the kernel's, by name."""

    grid: tuple[Size, ...]
    integers: Mapping[str, Size]


@dataclass(frozen=True)
class Tactic:
    """A kernel that computes what a plugin does. launch: of the shapes of the inputs."""

    variant: KernelVariant
    launch: Callable[[Shapes], Launch]


@dataclass(frozen=True)
class Plugin:
    """inputs, outputs: types of the kernels' tensors by name, such as "*fp16", in order.
    output_shapes: of the shapes of the inputs. tactics: TensorRT takes the fastest."""

    name: str  # the same for plugins that are the same
    inputs: Mapping[str, str]
    outputs: Mapping[str, str]
    output_shapes: Callable[[Shapes], Shapes]
    tactics: tuple[Tactic, ...]


def make_plugin(
    output_shapes: Callable[[Shapes], Shapes], outputs: str, *tactics: Tactic
) -> Plugin:
    """outputs: their names, in the kernel's order; all other tensors are inputs. Every tactic's
    kernel takes the same tensors in the same order, and calls them what it likes."""
    first = tactics[0].variant
    tensors = {name: kind for name, kind in first.signature.items() if kind[0] == "*"}
    names = outputs.split()
    digest = hashlib.sha256(json.dumps([_identity(each.variant) for each in tactics]).encode())
    return Plugin(
        name=f"{first.name}_{digest.hexdigest()[:12]}".replace(".", "_").replace("-", "_"),
        inputs={name: kind for name, kind in tensors.items() if name not in names},
        outputs={name: tensors[name] for name in names},
        output_shapes=output_shapes,
        tactics=tactics,
    )


def with_true_promises(variant: KernelVariant, **integers: int) -> KernelVariant:
    """The variant without a promise that one of these arguments is a multiple of 16 if it isn't."""
    broken = [name for name, value in integers.items() if value % 16]
    kept = tuple(name for name in variant.divisible_by_16 if name not in broken)
    return replace(variant, divisible_by_16=kept)


def arguments(plugin: Plugin, tactic: Tactic) -> list[str]:
    """Names of the kernel's arguments that aren't constants, in its order."""
    return [name for name, kind in tactic.variant.signature.items() if kind != "constexpr"]


def _identity(variant: KernelVariant) -> list[Any]:
    return [
        variant.name,
        list(variant.signature.items()),
        sorted(variant.constants.items()),
        sorted(variant.divisible_by_16),
        variant.num_warps,
        variant.num_stages,
    ]
