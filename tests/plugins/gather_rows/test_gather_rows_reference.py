"""The torch reference of gather_rows against a loop over the indices."""

import ml_dtypes
import numpy as np
import pytest
import torch

from llmbuild.plugins.gather_rows.op import gather_rows


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("rows", "width"), [(1, 1), (5, 3), (17, 64)])
def test_each_row_is_the_tables_as_fp32(rows: int, width: int, dtype: torch.dtype) -> None:
    rng = np.random.default_rng(rows)
    stored = rng.standard_normal((rows, width)).astype(np.float32)
    if dtype == torch.bfloat16:
        stored = stored.astype(ml_dtypes.bfloat16).astype(np.float32)
    index = [rows - 1, 0, 0, *rng.integers(0, rows, 4).tolist()]
    got = gather_rows(torch.from_numpy(stored).to(dtype), torch.tensor(index, dtype=torch.int32))
    assert got.dtype == torch.float32
    assert got.shape == (len(index), width)
    for row, chosen in zip(got.numpy(), index, strict=True):
        assert row.tolist() == stored[chosen].tolist()


def test_no_index_gives_no_row() -> None:
    got = gather_rows(torch.ones(2, 3), torch.tensor([], dtype=torch.int32))
    assert got.shape == (0, 3)
