"""gather_rows: rows of a table by index, as fp32: embedding look-up, and the choice of the
rows that need logits."""

import torch

from llmbuild.plugins.common.quantised import dequantise


@torch.library.custom_op("llmbuild::gather_rows", mutates_args=())
def gather_rows(table: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """table: fp32 or bf16 [rows, N]. index: int32 [R], each below rows. Returns fp32 [R, N]."""
    return table.index_select(0, index).float()


@gather_rows.register_fake
def _(table: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    return table.new_empty((index.shape[0], table.shape[1]), dtype=torch.float32)


@torch.library.custom_op("llmbuild::gather_quantised_rows", mutates_args=())
def gather_quantised_rows(
    codes: torch.Tensor,
    scales: torch.Tensor,
    minima: torch.Tensor | None,
    index: torch.Tensor,
    zero: int,
    zeros: torch.Tensor | None = None,
) -> torch.Tensor:
    """The same of a table on a grid: scale (code - zero), plus the group's minimum if it has one.

    codes: uint8 [rows, N]. scales, minima: fp16 [rows, groups]. index: int32 [R]. zeros: uint8
    [rows, groups], each group's own zero, in place of `zero`. Returns fp32 [R, N].
    """
    if minima is not None:
        minima = minima.index_select(0, index)
    if zeros is not None:
        zeros = zeros.index_select(0, index)
    codes, scales = codes.index_select(0, index), scales.index_select(0, index)
    return dequantise(codes, scales, minima, zero, zeros)


@gather_quantised_rows.register_fake
def _(
    codes: torch.Tensor,
    scales: torch.Tensor,
    minima: torch.Tensor | None,
    index: torch.Tensor,
    zero: int,
    zeros: torch.Tensor | None = None,
) -> torch.Tensor:
    return scales.new_empty((index.shape[0], codes.shape[1]), dtype=torch.float32)
