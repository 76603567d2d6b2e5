"""gated_activation: act(gate) * up, the middle of a gated MLP (Shazeer, "GLU Variants", 2020)."""

import torch

ACTIVATIONS = {"silu": torch.nn.functional.silu}


@torch.library.custom_op("llmbuild::gated_activation", mutates_args=())
def gated_activation(gate: torch.Tensor, up: torch.Tensor, activation: str) -> torch.Tensor:
    """gate, up: fp32 [T, N]. activation: a key of ACTIVATIONS. Returns fp32 [T, N]."""
    return ACTIVATIONS[activation](gate) * up


@gated_activation.register_fake
def _(gate: torch.Tensor, up: torch.Tensor, activation: str) -> torch.Tensor:
    return torch.empty_like(gate)
