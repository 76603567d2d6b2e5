"""rope_table: the cosines and sines of a step's positions, made once for all layers.

Two kinds depend on a sequence's length after the step: "switched" (longrope: Ding et al.,
"LongRoPE", 2024) and "dynamic" (NTK-aware scaling, as transformers computes it).
"""

from collections.abc import Callable

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


def _at_length(
    positions: torch.Tensor,
    query_start: torch.Tensor,
    kv_lengths: torch.Tensor,
    frequencies: Callable[[int], torch.Tensor],
    scale: float,
) -> torch.Tensor:
    """The table whose frequencies follow from the length of each token's sequence."""
    parts = []
    for sequence, length in enumerate(kv_lengths.tolist()):
        rows = slice(int(query_start[sequence]), int(query_start[sequence + 1]))
        parts.append(rope_table(positions[rows], frequencies(length), scale))
    return torch.cat(parts)


@torch.library.custom_op("llmbuild::switched_rope_table", mutates_args=())
def switched_rope_table(
    positions: torch.Tensor,
    query_start: torch.Tensor,
    kv_lengths: torch.Tensor,
    inv_freq: torch.Tensor,
    switch_length: int,
    scale: float,
) -> torch.Tensor:
    """inv_freq: fp32 [2, D/2]. Sequences longer than switch_length use row 1, others row 0."""
    return _at_length(
        positions, query_start, kv_lengths, lambda n: inv_freq[int(n > switch_length)], scale
    )


@switched_rope_table.register_fake
def _(
    positions: torch.Tensor,
    query_start: torch.Tensor,
    kv_lengths: torch.Tensor,
    inv_freq: torch.Tensor,
    switch_length: int,
    scale: float,
) -> torch.Tensor:
    return inv_freq.new_empty((positions.shape[0], 2 * inv_freq.shape[1]))


@torch.library.custom_op("llmbuild::dynamic_rope_table", mutates_args=())
def dynamic_rope_table(
    positions: torch.Tensor,
    query_start: torch.Tensor,
    kv_lengths: torch.Tensor,
    rotary_dim: int,
    theta: float,
    factor: float,
    original_length: int,
    scale: float,
) -> torch.Tensor:
    """theta grows with a sequence's length past original_length. Returns fp32 [T, rotary_dim]."""

    def frequencies(length: int) -> torch.Tensor:
        reach = factor * max(length, original_length) / original_length - (factor - 1)
        base = theta * reach ** (rotary_dim / (rotary_dim - 2))
        exponents = torch.arange(0, rotary_dim, 2, dtype=torch.float64) / rotary_dim
        return (base**-exponents).float()

    return _at_length(positions, query_start, kv_lengths, frequencies, scale)


@dynamic_rope_table.register_fake
def _(
    positions: torch.Tensor,
    query_start: torch.Tensor,
    kv_lengths: torch.Tensor,
    rotary_dim: int,
    theta: float,
    factor: float,
    original_length: int,
    scale: float,
) -> torch.Tensor:
    return torch.empty((positions.shape[0], rotary_dim))
