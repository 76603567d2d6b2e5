import numpy as np
import pytest
from kernel_harness import EACH_LEVEL, KernelCompiler, Library, bits

WIDTHS = [1, 7, 16, 17, 33, 576]
PAD = 3

# y = a * scale[row] + b * 0.5 - max(|a|, b), with one scale a row: every kind of operand at once.
SOURCE = '#include "elementwise/cpu.h"\n' + "".join(
    f"""
extern "C" void mix_{n}(int threads, const float* a, const float* b, const float* scale, float* y,
                        int rows) {{
  with_team(threads, [&](const Worker& worker) {{
    elementwise<{n}, {n + PAD}>(worker, y, rows, [&](int64_t row, int chunk) {{
      const f32x16 left = load_chunk<{n}>(a + row * {n}, chunk);
      const f32x16 right = load_chunk<{n}>(b + row * {n + 1}, chunk);
      const f32x16 scaled = left * splat_row<2>(scale, row);
      return scaled + right * splat(0.5f) - maximum(absolute(left), right);
    }});
  }});
}}
extern "C" void tanh_in_place_{n}(int threads, float* y, int rows) {{
  with_team(threads, [&](const Worker& worker) {{
    elementwise<{n}, {n + PAD}>(worker, y, rows, [&](int64_t row, int chunk) {{
      return Tanh::apply(load_chunk<{n}>(y + row * {n + PAD}, chunk));
    }});
  }});
}}
"""
    for n in WIDTHS
)


@pytest.fixture(params=EACH_LEVEL)
def library(request: pytest.FixtureRequest, compiler: KernelCompiler) -> Library:
    return compiler.library(SOURCE, request.param)


def mix(library: Library, operands: tuple[np.ndarray, ...], threads: int) -> np.ndarray:
    a, b, scale = (np.ascontiguousarray(operand) for operand in operands)
    rows, n = a.shape
    y = np.full((rows, n + PAD), 7.0, np.float32)
    library.call(f"mix_{n}", threads, a, b, scale, y, rows)
    assert (y[:, n:] == 7.0).all()
    return y[:, :n]


def operands_of(n: int, rows: int) -> tuple[np.ndarray, ...]:
    rng = np.random.default_rng(n)
    a, b, scale = (rng.standard_normal((rows, w)).astype(np.float32) for w in (n, n + 1, 2))
    b[:, n:] = np.nan
    return a, b, scale


@pytest.mark.parametrize("n", WIDTHS)
def test_expression_is_applied_to_every_element(library: Library, n: int) -> None:
    for rows in (0, 1, 2, 13):
        a, b, scale = operands_of(n, rows)
        left, right = a.astype(np.float64), b[:, :n].astype(np.float64)
        expected = left * scale[:, :1] + right * 0.5 - np.maximum(np.abs(left), right)
        result = mix(library, (a, b, scale), 2)
        np.testing.assert_allclose(result, expected, rtol=0, atol=16 * 4 * 2.0**-24)


@pytest.mark.parametrize("n", WIDTHS)
def test_output_may_be_the_operand(library: Library, n: int) -> None:
    y = np.random.default_rng(n).standard_normal((13, n + PAD)).astype(np.float32)
    before = y.copy()
    library.call(f"tanh_in_place_{n}", 3, y, 13)
    np.testing.assert_allclose(y[:, :n], np.tanh(before[:, :n].astype(np.float64)), rtol=2e-7)
    np.testing.assert_array_equal(y[:, n:], before[:, n:])


@pytest.mark.parametrize("n", WIDTHS)
def test_a_row_has_the_same_bits_in_any_batch_and_team(library: Library, n: int) -> None:
    operands = operands_of(n, 13)
    together = mix(library, operands, 1)
    np.testing.assert_array_equal(bits(mix(library, operands, 3)), bits(together))
    for row in range(13):
        alone = mix(library, tuple(operand[row : row + 1] for operand in operands), 2)
        np.testing.assert_array_equal(bits(alone), bits(together[row : row + 1]))
