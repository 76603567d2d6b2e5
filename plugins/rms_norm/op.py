"""rms_norm and its fusion with the residual add before it.

RMSNorm: Zhang and Sennrich, "Root Mean Square Layer Normalization", 2019.
"""

import torch


@torch.library.custom_op("llmbuild::rms_norm", mutates_args=())
def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Normalise each group of len(weight) neighbours of a row by its root mean square.

    x: fp32 [T, N], N a multiple of len(weight): one group a row is the plain RMSNorm, one a
    head is QK-norm. weight: fp32 [group]. Returns fp32 [T, N].
    """
    groups = x.unflatten(-1, (-1, weight.shape[0]))
    scale = torch.rsqrt(groups.square().mean(-1, keepdim=True) + eps)
    return (groups * scale * weight).flatten(-2)


@rms_norm.register_fake
def _(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return torch.empty_like(x)


@torch.library.custom_op("llmbuild::add_rms_norm", mutates_args=())
def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """The new residual x + residual, and its RMSNorm; all fp32 [T, N], weight [N]."""
    total = x + residual
    return total, rms_norm(total, weight, eps)


@add_rms_norm.register_fake
def _(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty_like(x), torch.empty_like(x)
