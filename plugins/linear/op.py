"""linear: y = x W^T + b, weights in their stored type, accumulation in fp32."""

import torch


@torch.library.custom_op("llmbuild::linear", mutates_args=())
def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """x: fp32 [T, K]. weight: fp32 or bf16 [N, K]. bias: [N] or None. Returns fp32 [T, N]."""
    return torch.nn.functional.linear(x, weight.float(), None if bias is None else bias.float())


@linear.register_fake
def _(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return x.new_empty((x.shape[0], weight.shape[0]))
