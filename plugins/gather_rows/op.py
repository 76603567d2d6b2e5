"""gather_rows: rows of a table by index, as fp32: embedding look-up, and the choice of the
rows that need logits."""

import torch

from llmbuild.plugins.common.quantised import dequantise


def _own(index: torch.Tensor, rows: int, first: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Where the rows lie in a table that begins at row `first`, any place for one that it hasn't;
    and which it has, as a column."""
    places = index - first
    has = (places >= 0) & (places < rows)
    return places.where(has, 0), has[:, None]


@torch.library.custom_op("llmbuild::gather_rows", mutates_args=())
def gather_rows(table: torch.Tensor, index: torch.Tensor, first: int) -> torch.Tensor:
    """table: fp32 or bf16 [rows, N], rows `first` and on of a larger one. index: int32 [R].
    Returns fp32 [R, N], zeros for a row that the table hasn't."""
    places, has = _own(index, table.shape[0], first)
    return table.index_select(0, places).float().where(has, 0.0)


@gather_rows.register_fake
def _(table: torch.Tensor, index: torch.Tensor, first: int) -> torch.Tensor:
    return table.new_empty((index.shape[0], table.shape[1]), dtype=torch.float32)


@torch.library.custom_op("llmbuild::gather_quantised_rows", mutates_args=())
def gather_quantised_rows(
    codes: torch.Tensor,
    scales: torch.Tensor,
    minima: torch.Tensor | None,
    index: torch.Tensor,
    zero: int,
    first: int,
    zeros: torch.Tensor | None = None,
) -> torch.Tensor:
    """The same of a table on a grid: scale (code - zero), plus the group's minimum if it has one.

    codes: uint8 [rows, N]. scales, minima: fp16 [rows, groups]. index: int32 [R]. zeros: uint8
    [rows, groups], each group's own zero, in place of `zero`. Returns fp32 [R, N].
    """
    places, has = _own(index, codes.shape[0], first)
    if minima is not None:
        minima = minima.index_select(0, places)
    if zeros is not None:
        zeros = zeros.index_select(0, places)
    codes, scales = codes.index_select(0, places), scales.index_select(0, places)
    return dequantise(codes, scales, minima, zero, zeros).where(has, 0.0)


@gather_quantised_rows.register_fake
def _(
    codes: torch.Tensor,
    scales: torch.Tensor,
    minima: torch.Tensor | None,
    index: torch.Tensor,
    zero: int,
    first: int,
    zeros: torch.Tensor | None = None,
) -> torch.Tensor:
    return scales.new_empty((index.shape[0], codes.shape[1]), dtype=torch.float32)
