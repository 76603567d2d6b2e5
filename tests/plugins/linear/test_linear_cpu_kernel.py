import numpy as np
import pytest
from kernel_harness import DTYPES, EACH_LEVEL, KernelCompiler, Library, bits

# (N, K); 2049 and 4100 cross the kernel's K blocks.
SHAPES = [(1, 1), (7, 33), (17, 7), (33, 17), (576, 33), (65, 576), (17, 2049), (49, 4100)]
ROWS = [0, 1, 2, 3, 5, 8, 9, 13]
PAD_X, PAD_Y = 3, 5

SOURCE = '#include "linear/cpu.h"\n' + "".join(
    f"""
extern "C" void linear_{weight}_{n}_{k}(int threads, const float* x, const {weight}* w,
                                        const float* bias, float* y, int rows) {{
  with_team(threads, [&](const Worker& worker) {{
    linear<{weight}, {n}, {k}, {k + PAD_X}, {n + PAD_Y}>(worker, x, w, bias, y, rows);
  }});
}}
"""
    for weight in DTYPES
    for n, k in SHAPES
)


@pytest.fixture(params=EACH_LEVEL)
def library(request: pytest.FixtureRequest, compiler: KernelCompiler) -> Library:
    return compiler.library(SOURCE, request.param)


def pack(weight: np.ndarray) -> np.ndarray:
    n, k = weight.shape
    tiles = -(-n // 16)
    padded = np.zeros((tiles * 16, k), weight.dtype)
    padded[:n] = weight
    return np.ascontiguousarray(padded.reshape(tiles, 16, k).transpose(0, 2, 1))


def random_case(n: int, k: int, dtype: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(n * 10007 + k)
    x = rng.standard_normal((max(ROWS), k + PAD_X)).astype(np.float32)
    x[:, k:] = np.nan
    weight = rng.standard_normal((n, k)).astype(DTYPES[dtype])
    return x, weight, rng.standard_normal(n).astype(np.float32)


def run(
    library: Library,
    x: np.ndarray,
    weight: np.ndarray,
    bias: np.ndarray | None,
    dtype: str,
    threads: int = 2,
) -> np.ndarray:
    n, k = weight.shape
    y = np.full((len(x), n + PAD_Y), 7.0, np.float32)
    library.call(f"linear_{dtype}_{n}_{k}", threads, x, pack(weight), bias, y, len(x))
    assert (y[:, n:] == 7.0).all(), "columns past N were written"
    return y[:, :n]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_linear_is_within_the_rounding_bound_of_float64(
    library: Library, n: int, k: int, dtype: str
) -> None:
    x, weight, bias = random_case(n, k, dtype)
    exact = x[:, :k].astype(np.float64) @ weight.astype(np.float64).T
    bound = (np.abs(x[:, :k]).astype(np.float64) @ np.abs(weight.astype(np.float64)).T) + 10
    for rows in ROWS:
        plain = run(library, x[:rows], weight, None, dtype)
        biased = run(library, x[:rows], weight, bias, dtype)
        assert (np.abs(plain - exact[:rows]) <= (k + 1) * 2.0**-24 * bound[:rows]).all()
        assert (np.abs(biased - exact[:rows] - bias) <= (k + 2) * 2.0**-24 * bound[:rows]).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_linear_of_a_row_has_the_same_bits_in_any_batch_and_team(
    library: Library, n: int, k: int, dtype: str
) -> None:
    x, weight, bias = random_case(n, k, dtype)
    together = run(library, x, weight, bias, dtype, threads=1)
    for threads in (2, 3):
        again = run(library, x, weight, bias, dtype, threads)
        np.testing.assert_array_equal(bits(again), bits(together))
    for rows in ROWS:
        first = run(library, x[:rows], weight, bias, dtype)
        np.testing.assert_array_equal(bits(first), bits(together[:rows]))
    for row in range(len(x)):
        alone = run(library, x[row : row + 1], weight, bias, dtype)
        np.testing.assert_array_equal(bits(alone), bits(together[row : row + 1]))
