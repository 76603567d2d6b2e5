"""gather_rows: rows of a table by index, as fp32: embedding look-up, and the choice of the
rows that need logits."""

import torch


@torch.library.custom_op("llmbuild::gather_rows", mutates_args=())
def gather_rows(table: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """table: fp32 or bf16 [rows, N]. index: int32 [R], each below rows. Returns fp32 [R, N]."""
    return table.index_select(0, index).float()


@gather_rows.register_fake
def _(table: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    return table.new_empty((index.shape[0], table.shape[1]), dtype=torch.float32)
