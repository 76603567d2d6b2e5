"""activation, and gated_activation: act(gate) * up, the middle of a gated MLP (Shazeer, "GLU
Variants", 2020)."""

from collections.abc import Callable

import torch
from torch.nn import functional

ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
    "relu": functional.relu,
    "relu2": lambda x: functional.relu(x).square(),
}


@torch.library.custom_op("llmbuild::activation", mutates_args=())
def activation(x: torch.Tensor, kind: str) -> torch.Tensor:
    """x: fp32 [T, N]. kind: a key of ACTIVATIONS. Returns fp32 [T, N]."""
    return ACTIVATIONS[kind](x)


@activation.register_fake
def _(x: torch.Tensor, kind: str) -> torch.Tensor:
    return torch.empty_like(x)


@torch.library.custom_op("llmbuild::gated_activation", mutates_args=())
def gated_activation(gate: torch.Tensor, up: torch.Tensor, activation: str) -> torch.Tensor:
    """gate, up: fp32 [T, N]. activation: a key of ACTIVATIONS. Returns fp32 [T, N]."""
    return ACTIVATIONS[activation](gate) * up


@gated_activation.register_fake
def _(gate: torch.Tensor, up: torch.Tensor, activation: str) -> torch.Tensor:
    return torch.empty_like(gate)
