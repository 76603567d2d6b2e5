import numpy as np
import pytest
from kernel_harness import LEVELS, KernelCompiler, Library, bits

WIDTHS = [1, 7, 17, 33, 576]

# gate and up are the two halves of one buffer, as a merged gate/up projection leaves them.
SOURCE = '#include "gated_activation/cpu.h"\n' + "".join(
    f"""
extern "C" void silu_{n}(int threads, const float* both, float* y, int rows) {{
  with_team(threads, [&](const Worker& worker) {{
    gated_activation<{n}, {2 * n}, {2 * n}, {n + 3}, Silu>(worker, both, both + {n}, y, rows);
  }});
}}
"""
    for n in WIDTHS
)


@pytest.fixture(params=LEVELS)
def library(request: pytest.FixtureRequest, compiler: KernelCompiler) -> Library:
    return compiler.library(SOURCE, request.param)


def run(library: Library, both: np.ndarray, threads: int) -> np.ndarray:
    rows, n = len(both), both.shape[1] // 2
    y = np.full((rows, n + 3), 7.0, np.float32)
    library.call(f"silu_{n}", threads, both, y, rows)
    assert (y[:, n:] == 7.0).all()
    return y[:, :n]


@pytest.mark.parametrize("n", WIDTHS)
def test_silu_times_up_is_within_rounding_of_float64(library: Library, n: int) -> None:
    for rows in (0, 1, 2, 13):
        both = np.random.default_rng(n).standard_normal((rows, 2 * n)).astype(np.float32)
        both[:, :n] *= 20
        gate, up = both[:, :n].astype(np.float64), both[:, n:].astype(np.float64)
        expected = gate / (1 + np.exp(-gate)) * up
        np.testing.assert_allclose(run(library, both, 2), expected, rtol=6 * 2.0**-23, atol=1e-37)


def test_silu_of_extreme_gates_has_the_right_limits(library: Library) -> None:
    gate = np.array([-np.inf, -1e30, -200, -88, -0.0, 0, 88, 200, 1e30, np.nan], np.float32)
    both = np.ones((len(gate), 2), np.float32)
    both[:, 0] = gate
    y = run(library, both, 1)[:, 0]
    np.testing.assert_array_equal(y[[1, 2, 4, 5, 6, 7, 8]], [-0.0, -0.0, -0.0, 0, 88, 200, gate[8]])
    assert abs(y[3] + 88 * np.exp(-88.0)) <= 1e-5 * 88 * np.exp(-88.0)
    assert np.isnan(y[[0, 9]]).all()  # -inf * 0, as the formula has it


@pytest.mark.parametrize("n", WIDTHS)
def test_activation_has_the_same_bits_in_any_batch_and_team(library: Library, n: int) -> None:
    both = np.random.default_rng(n).standard_normal((13, 2 * n)).astype(np.float32) * 5
    together = run(library, both, 1)
    np.testing.assert_array_equal(bits(run(library, both, 3)), bits(together))
    for row in range(13):
        alone = run(library, both[row : row + 1].copy(), 2)
        np.testing.assert_array_equal(bits(alone), bits(together[row : row + 1]))
