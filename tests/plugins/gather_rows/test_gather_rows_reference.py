"""The torch references of gather_rows and gather_quantised_rows against loops over the indices."""

import ml_dtypes
import numpy as np
import pytest
import torch

from llmbuild.plugins.gather_rows.op import gather_quantised_rows, gather_rows


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("rows", "width"), [(1, 1), (5, 3), (17, 64)])
def test_each_row_is_the_tables_as_fp32(rows: int, width: int, dtype: torch.dtype) -> None:
    rng = np.random.default_rng(rows)
    stored = rng.standard_normal((rows, width)).astype(np.float32)
    if dtype == torch.bfloat16:
        stored = stored.astype(ml_dtypes.bfloat16).astype(np.float32)
    index = [rows - 1, 0, 0, *rng.integers(0, rows, 4).tolist()]
    got = gather_rows(torch.from_numpy(stored).to(dtype), torch.tensor(index, dtype=torch.int32), 0)
    assert got.dtype == torch.float32
    assert got.shape == (len(index), width)
    for row, chosen in zip(got.numpy(), index, strict=True):
        assert row.tolist() == stored[chosen].tolist()


def test_no_index_gives_no_row() -> None:
    got = gather_rows(torch.ones(2, 3), torch.tensor([], dtype=torch.int32), 0)
    assert got.shape == (0, 3)


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize(("rows", "width", "groups"), [(1, 32, 1), (5, 96, 3), (17, 64, 1)])
def test_each_row_of_a_quantised_table_is_what_its_codes_stand_for(
    rows: int, width: int, groups: int, symmetric: bool
) -> None:
    rng = np.random.default_rng(rows)
    codes = rng.integers(0, 16, (rows, width), dtype=np.uint8)
    scales, minima = (rng.normal(0, 0.1, (rows, groups)).astype(np.float16) for _ in "ab")
    index = [rows - 1, 0, 0, *rng.integers(0, rows, 4).tolist()]
    got = gather_quantised_rows(
        *map(torch.from_numpy, (codes, scales)),
        None if symmetric else torch.from_numpy(minima),
        torch.tensor(index, dtype=torch.int32),
        8 if symmetric else 0,
        0,
    )
    assert (got.dtype, tuple(got.shape)) == (torch.float32, (len(index), width))
    for row, chosen in zip(got.numpy(), index, strict=True):
        for column, value in enumerate(row):
            group = column // (width // groups)
            code = int(codes[chosen, column]) - (8 if symmetric else 0)
            product = np.float32(float(scales[chosen, group]) * code)
            assert value == product + (0 if symmetric else np.float32(minima[chosen, group]))


def test_rows_of_a_table_with_zero_points_take_their_own() -> None:
    rng = np.random.default_rng(0)
    codes, zeros = (rng.integers(0, 16, shape, dtype=np.uint8) for shape in ((5, 64), (5, 2)))
    scales = rng.normal(0, 0.1, (5, 2)).astype(np.float16)
    table = map(torch.from_numpy, (codes, scales))
    index = torch.tensor([4, 0, 4], dtype=torch.int32)
    got = gather_quantised_rows(*table, None, index, 0, 0, torch.from_numpy(zeros))
    whole = codes.astype(np.float32) - np.repeat(zeros.astype(np.float32), 32, axis=1)
    values = whole * np.repeat(scales.astype(np.float32), 32, axis=1)
    assert got.numpy().tolist() == values[index].tolist()


def test_no_index_gives_no_quantised_row() -> None:
    codes, scales = torch.ones(2, 32, dtype=torch.uint8), torch.ones(2, 1, dtype=torch.float16)
    got = gather_quantised_rows(codes, scales, None, torch.tensor([], dtype=torch.int32), 8, 0)
    assert got.shape == (0, 32)


def test_a_rank_gives_zeros_for_rows_of_other_ranks() -> None:
    table = torch.arange(1.0, 13.0).reshape(4, 3)  # rows 5 to 8 of a larger one
    index = torch.tensor([4, 5, 8, 9, 0, 6], dtype=torch.int32)
    got = gather_rows(table, index, 5)
    wanted = [[0] * 3, [1, 2, 3], [10, 11, 12], [0] * 3, [0] * 3, [4, 5, 6]]
    assert got.tolist() == wanted
    codes = torch.full((2, 32), 9, dtype=torch.uint8)
    scales, minima = torch.ones(2, 1, dtype=torch.float16), torch.ones(2, 1, dtype=torch.float16)
    index = torch.tensor([6, 7, 8, 9], dtype=torch.int32)
    got = gather_quantised_rows(codes, scales, minima, index, 0, 7)
    assert got[:, 0].tolist() == got[:, 31].tolist() == [0, 10, 10, 0]
