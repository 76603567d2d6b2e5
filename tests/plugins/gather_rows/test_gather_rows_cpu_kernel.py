import numpy as np
import pytest
from kernel_harness import DTYPES, LEVELS, KernelCompiler, Library, bits

WIDTHS = [1, 7, 17, 33, 576]

SOURCE = '#include "gather_rows/cpu.h"\n' + "".join(
    f"""
extern "C" void gather_{weight}_{n}(int threads, const {weight}* table, const int32_t* index,
                                    float* y, int rows) {{
  with_team(threads, [&](const Worker& worker) {{
    gather_rows<{weight}, {n}, {n + 3}>(worker, table, index, y, rows);
  }});
}}
"""
    for weight in DTYPES
    for n in WIDTHS
)


@pytest.fixture(params=LEVELS)
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
        library.call(f"gather_{dtype}_{n}", threads, table, index, y, rows)
        np.testing.assert_array_equal(bits(y[:, :n]), bits(table[index].astype(np.float32)))
        assert (y[:, n:] == 7.0).all()
