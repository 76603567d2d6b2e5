"""layer_norm: Ba, Kiros and Hinton, "Layer Normalization", 2016."""

import torch


@torch.library.custom_op("llmbuild::layer_norm", mutates_args=())
def layer_norm(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, eps: float
) -> torch.Tensor:
    """x: fp32 [T, N]. weight: fp32 [N]. bias: fp32 [N] or None. Returns fp32 [T, N]."""
    return torch.nn.functional.layer_norm(x, weight.shape, weight, bias, eps)


@layer_norm.register_fake
def _(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, eps: float) -> torch.Tensor:
    return torch.empty_like(x)
