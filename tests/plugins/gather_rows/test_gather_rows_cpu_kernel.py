import numpy as np
import pytest
from kernel_harness import DTYPES, EACH_LEVEL, KernelCompiler, Library, bits

WIDTHS = [1, 7, 17, 33, 576]

SOURCE = '#include "gather_rows/cpu.h"\n' + "".join(
    f"""
extern "C" void gather_{weight}_{n}(int threads, const {weight}* table, int first, int count,
                                    const int32_t* index, float* y, int rows) {{
  with_team(threads, [&](const Worker& worker) {{
    const OwnRows own{{first, count}};
    gather_rows<{weight}, {n}, {n + 3}>(worker, table, own, index, y, rows);
  }});
}}
extern "C" void gather_tiled_{weight}_{n}(int threads, const {weight}* table, int first, int count,
                                          const int32_t* index, float* y, int rows) {{
  with_team(threads, [&](const Worker& worker) {{
    gather_tiled_rows<{weight}, {n}, {n + 3}>(worker, table, OwnRows{{first, count}},
                                              index, y, rows);
  }});
}}
"""
    for weight in DTYPES
    for n in WIDTHS
)


@pytest.fixture(params=EACH_LEVEL)
def library(request: pytest.FixtureRequest, compiler: KernelCompiler) -> Library:
    return compiler.library(SOURCE, request.param)


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n", WIDTHS)
def test_gathered_rows_are_the_indexed_rows_exactly(
    library: Library, n: int, dtype: str, threads: int
) -> None:
    rng = np.random.default_rng(n)
    table = rng.standard_normal((11, n)).astype(DTYPES[dtype])
    for rows in (0, 1, 2, 13):
        index = rng.integers(0, 11, rows, dtype=np.int32)
        y = np.full((rows, n + 3), 7.0, np.float32)
        library.call(f"gather_{dtype}_{n}", threads, table, 0, 11, index, y, rows)
        np.testing.assert_array_equal(bits(y[:, :n]), bits(table[index].astype(np.float32)))
        assert (y[:, n:] == 7.0).all()


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n", WIDTHS)
def test_rows_gathered_from_tiles_are_the_indexed_rows_exactly(
    library: Library, n: int, dtype: str, threads: int
) -> None:
    rng = np.random.default_rng(n)
    table = rng.standard_normal((37, n)).astype(DTYPES[dtype])
    padded = np.full((48, n), np.nan, DTYPES[dtype])
    padded[:37] = table
    tiles = np.ascontiguousarray(padded.reshape(3, 16, n).transpose(0, 2, 1))
    for index in ([], [36], [0, 15, 16, 31, 32, 36, 16], rng.integers(0, 37, 13)):
        y = np.full((len(index), n + 3), 7.0, np.float32)
        chosen = np.array(index, np.int32)
        library.call(f"gather_tiled_{dtype}_{n}", threads, tiles, 0, 37, chosen, y, len(index))
        np.testing.assert_array_equal(bits(y[:, :n]), bits(table[chosen].astype(np.float32)))
        assert (y[:, n:] == 7.0).all()


@pytest.mark.parametrize("kernel", ["gather", "gather_tiled"])
@pytest.mark.parametrize("n", WIDTHS)
def test_rows_that_the_table_has_not_are_zeros(library: Library, n: int, kernel: str) -> None:
    rng = np.random.default_rng(n)
    table = np.zeros((32, n), np.float32)
    table[:19] = rng.standard_normal((19, n))
    tiles = np.ascontiguousarray(table.reshape(2, 16, n).transpose(0, 2, 1))
    index = np.array([100, 99, 118, 119, 0, 116], np.int32)  # it has 100 to 118
    y = np.full((len(index), n + 3), 7.0, np.float32)
    stored = tiles if kernel == "gather_tiled" else table
    library.call(f"{kernel}_float_{n}", 2, stored, 100, 19, index, y, len(index))
    np.testing.assert_array_equal(y[[0, 2, 5], :n], table[[0, 18, 16]])
    assert (y[[1, 3, 4], :n] == 0).all()
    assert (y[:, n:] == 7.0).all()
