"""The GPU kernels of gather_rows against the torch references, in Triton's interpreter."""

import numpy as np
import pytest
import torch
from quantised_matrices import random_matrix
from triton_harness import launch

from llmbuild.builder.targets.gpu.pack import pack
from llmbuild.plugins.common.weight_format import WeightFormat
from llmbuild.plugins.gather_rows import triton as kernels
from llmbuild.plugins.gather_rows.op import gather_quantised_rows, gather_rows

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
SIZES = [(1, 1), (5, 63), (7, 64), (11, 161)]


def random_index(rows: int) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(rows).integers(0, rows, 4).astype(np.int32))


@pytest.mark.parametrize("to", DTYPES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "width"), SIZES)
def test_rows_are_copied_and_rounded(
    rows: int, width: int, dtype: torch.dtype, to: torch.dtype
) -> None:
    rng = np.random.default_rng(width)
    table = torch.from_numpy(rng.standard_normal((rows, width))).to(dtype)
    index = random_index(rows)
    y = torch.full((len(index), width), torch.nan, dtype=to)
    launch(
        kernels.gather_rows,
        (len(index), -(-width // 64)),
        table=table,
        index=index,
        rows=rows,
        N=width,
        y=y,
        FIRST=0,
        COLUMNS=64,
    )
    assert torch.equal(y, gather_rows(table.float(), index, 0).to(to))


def test_rows_that_the_table_has_not_are_zeros() -> None:
    """A rank's part of a table, and an index that is garbage, as of padding."""
    table = torch.arange(1.0, 16).reshape(3, 5)
    index = torch.tensor([99, 100, 102, 103, 0, -1, 2**31 - 1], dtype=torch.int32)
    y = torch.full((len(index), 5), torch.nan)
    launch(
        kernels.gather_rows,
        (len(index), 1),
        table=table,
        index=index,
        rows=3,
        N=5,
        y=y,
        FIRST=100,
        COLUMNS=64,
    )
    expected = torch.zeros_like(y)
    expected[1], expected[2] = table[0], table[2]
    assert torch.equal(y, expected)


@pytest.mark.parametrize("first", [0, 1000])
@pytest.mark.parametrize(
    "weights",
    [
        WeightFormat("int4", 32),
        WeightFormat("int4", 96, "minima"),
        WeightFormat("int4", 64, "zeros"),
        WeightFormat("int8", 32),
        WeightFormat("int8", 0),
        WeightFormat("int8", 64, "minima"),
        WeightFormat("int8", 0, "zeros"),
    ],
    ids=lambda weights: weights.name,
)
def test_rows_on_a_grid_are_dequantised(weights: WeightFormat, first: int) -> None:
    rows, width = 7, 192
    matrix = random_matrix(weights, rows, width)
    index = torch.tensor([first, first + 6, first + 3, first - 1, first + 7], dtype=torch.int32)
    y = torch.full((len(index), width), torch.nan)
    packed = pack(matrix)
    launch(
        kernels.gather_quantised_rows,
        (len(index), 3),
        **vars(packed),
        index=index,
        rows=rows,
        N=width,
        y=y,
        FIRST=first,
        BITS=weights.bits,
        GROUP=weights.group,
        COLUMNS=64,
    )
    parts = (matrix.codes, matrix.scales, matrix.minima, matrix.zeros)
    codes, scales, minima, zeros = (None if p is None else torch.from_numpy(p) for p in parts)
    assert codes is not None
    assert scales is not None
    expected = gather_quantised_rows(
        codes, scales, minima, index, matrix.grid.zero if minima is None else 0, first, zeros
    )
    torch.testing.assert_close(y, expected, rtol=0, atol=2e-6)
    assert not y[3:].any()
