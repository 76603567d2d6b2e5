import numpy as np
import pytest
from kernel_harness import EACH_LEVEL, KernelCompiler, Library, bits

from llmbuild.builder.targets.cpu.pack_quantised import pack_quantised
from llmbuild.quant.grid import QuantisedMatrix, WeightGrid

TABLE_ROWS = 37
# Grid and width of a row.
CASES = [
    (WeightGrid(4, 32, False), 96),
    (WeightGrid(4, 64, True), 576),
    (WeightGrid(4, 0, True), 32),
    (WeightGrid(8, 32, True), 160),
    (WeightGrid(8, 192, False), 576),
    (WeightGrid(8, 0, True), 96),
    (WeightGrid(4, 64, False, zero_points=True), 192),
    (WeightGrid(8, 0, False, zero_points=True), 96),
]

SOURCE = '#include "gather_rows/cpu.h"\n' + "".join(
    f"""
extern "C" void gather_{i}(int threads, const uint8_t* table, int first, int count,
                           const int32_t* index, float* y, int rows) {{
  using Table = Grid<{grid.bits}, {grid.columns_of(k)}, {str(not grid.symmetric).lower()},
                     {str(grid.zero_points).lower()}>;
  with_team(threads, [&](const Worker& worker) {{
    gather_quantised_rows<Table, {k}, {k + 3}>(worker, table, OwnRows{{first, count}},
                                               index, y, rows);
  }});
}}
"""
    for i, (grid, k) in enumerate(CASES)
)


@pytest.fixture(params=EACH_LEVEL)
def library(request: pytest.FixtureRequest, compiler: KernelCompiler) -> Library:
    return compiler.library(SOURCE, request.param)


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("number", range(len(CASES)))
def test_gathered_rows_are_the_dequantised_rows_exactly(
    library: Library, number: int, threads: int
) -> None:
    grid, k = CASES[number]
    rng = np.random.default_rng(number)
    groups = (TABLE_ROWS, k // grid.columns_of(k))
    table = QuantisedMatrix(
        grid,
        rng.integers(0, 1 << grid.bits, (TABLE_ROWS, k), dtype=np.uint8),
        rng.standard_normal(groups).astype(np.float16),
        rng.standard_normal(groups).astype(np.float16) if grid.has_minima else None,
        rng.integers(0, 1 << grid.bits, groups, dtype=np.uint8) if grid.zero_points else None,
    )
    packed = np.concatenate(list(pack_quantised(table)))
    # A product of 11 and 8 bits is exact in fp32; the sum with a minimum rounds once.
    width = grid.columns_of(k)
    exact = table.codes.astype(np.float64) - (grid.zero if grid.symmetric else 0)
    if table.zeros is not None:
        exact -= np.repeat(table.zeros.astype(np.float64), width, axis=1)
    exact *= np.repeat(table.scales.astype(np.float64), width, axis=1)
    if table.minima is not None:
        exact += np.repeat(table.minima.astype(np.float64), width, axis=1)
    values = exact.astype(np.float32)
    everywhere = np.concatenate([values, np.zeros((1, k), np.float32)])  # the last: no row's
    for chosen in ([], [36], [0, 15, 16, 31, 32, 36, 16], rng.integers(0, TABLE_ROWS, 13)):
        for first in (0, 5):  # with a row before and one behind those that the table has
            index = np.array([*chosen, -1, TABLE_ROWS], np.int32)
            y = np.full((len(index), k + 3), 7.0, np.float32)
            place = (packed, first, TABLE_ROWS, index + np.int32(first))
            library.call(f"gather_{number}", threads, *place, y, len(index))
            rows = [*chosen, TABLE_ROWS, TABLE_ROWS]
            np.testing.assert_array_equal(bits(y[:, :k]), bits(everywhere[rows]))
            assert (y[:, k:] == 7.0).all()
