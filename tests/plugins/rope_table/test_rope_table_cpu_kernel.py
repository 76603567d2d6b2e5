import numpy as np
import pytest
from kernel_harness import LEVELS, KernelCompiler, Library, bits

HALVES = [1, 3, 10, 32, 64]

SOURCE = '#include "rope_table/cpu.h"\n' + "".join(
    f"""
extern "C" void rope_table_{half}(int threads, const int32_t* positions, const float* inv_freq,
                                  float scale, float* table, int rows) {{
  with_team(threads, [&](const Worker& worker) {{
    rope_table<{half}>(worker, positions, inv_freq, scale, table, rows);
  }});
}}
"""
    for half in HALVES
)


@pytest.fixture(params=LEVELS)
def library(request: pytest.FixtureRequest, compiler: KernelCompiler) -> Library:
    return compiler.library(SOURCE, request.param)


@pytest.mark.parametrize("scale", [1.0, 1.25])
@pytest.mark.parametrize("half", HALVES)
def test_table_holds_cosines_and_sines_of_the_fp32_angle(
    library: Library, half: int, scale: float
) -> None:
    positions = np.array([0, 1, 5, 8191, 131071, 16777215, 2], np.int32)
    inv_freq = (1 / 10000 ** (np.arange(half) / half)).astype(np.float32)
    angle = (positions.astype(np.float32)[:, None] * inv_freq).astype(np.float64)
    expected = np.concatenate([np.cos(angle), np.sin(angle)], axis=1) * scale
    for rows in (0, 1, 7):
        table = np.empty((rows, 2 * half), np.float32)
        library.call(f"rope_table_{half}", 2, positions[:rows].copy(), inv_freq, scale, table, rows)
        assert (np.abs(table - expected[:rows]) <= 2.0**-23 * scale).all()


def test_table_does_not_depend_on_the_team(library: Library) -> None:
    positions = np.arange(1000, 1013, dtype=np.int32)
    inv_freq = (1 / 500000 ** (np.arange(32) / 32)).astype(np.float32)
    tables = [np.empty((13, 64), np.float32) for _ in range(3)]
    for threads, table in enumerate(tables, 1):
        library.call("rope_table_32", threads, positions, inv_freq, 1.0, table, 13)
        np.testing.assert_array_equal(bits(table), bits(tables[0]))
