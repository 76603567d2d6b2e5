"""rope_table: the cosines and sines of a step's positions, made once for all layers."""

import torch


@torch.library.custom_op("llmbuild::rope_table", mutates_args=())
def rope_table(positions: torch.Tensor, inv_freq: torch.Tensor, scale: float) -> torch.Tensor:
    """positions: int32 [T]. inv_freq: fp32 [D/2]. Returns fp32 [T, D]: cosines, then sines,
    times scale (the attention factor of RoPE kinds that have one). Angles are fp32 products."""
    angles = positions.float()[:, None] * inv_freq
    return torch.cat((angles.cos(), angles.sin()), dim=-1) * scale


@rope_table.register_fake
def _(positions: torch.Tensor, inv_freq: torch.Tensor, scale: float) -> torch.Tensor:
    return inv_freq.new_empty((positions.shape[0], 2 * inv_freq.shape[0]))
