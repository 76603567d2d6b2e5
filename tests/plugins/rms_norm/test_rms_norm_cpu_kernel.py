import numpy as np
import pytest
from int8_rows import encode, quantise, quantise_static
from kernel_harness import EACH_LEVEL, KernelCompiler, Library, bits

# (N, GROUP)
SHAPES = [(1, 1), (7, 7), (17, 17), (33, 33), (576, 576), (60, 20), (12, 6), (256, 64), (14, 2)]
PAD = 3
EPS = 1e-5
INT8 = [(32, 32), (96, 32), (576, 64), (160, 160)]  # (N, columns of an activation group)

SOURCE = '#include "rms_norm/cpu.h"\n' + "".join(
    f"""
extern "C" void rms_norm_{n}_{group}(int threads, const float* x, const float* w, float eps,
                                     float* y, int rows) {{
  with_team(threads, [&](const Worker& worker) {{
    rms_norm<{n}, {group}, {n + PAD}, {n + PAD}>(worker, x, w, eps, y, rows);
  }});
}}
extern "C" void add_rms_norm_{n}_{group}(int threads, const float* x, const float* residual,
                                         const float* w, float eps, float* sum, float* y,
                                         int rows) {{
  with_team(threads, [&](const Worker& worker) {{
    add_rms_norm<{n}, {n + PAD}, {n}, {n}, {n + PAD}>(worker, x, residual, w, eps, sum, y, rows);
  }});
}}
"""
    for n, group in SHAPES
)
SOURCE += "".join(
    f"""
extern "C" void plain_{n}_{a}(int threads, const float* x, const float* w, float eps, float* y,
                              int rows) {{
  with_team(threads, [&](const Worker& worker) {{
    rms_norm<{n}, {n}, {n + PAD}, {n}>(worker, x, w, eps, y, rows);
  }});
}}
extern "C" void int8_{n}_{a}(int threads, const float* x, const float* w, float eps, uint8_t* y,
                             int rows) {{
  with_team(threads, [&](const Worker& worker) {{
    rms_norm_int8<{n}, {a}, {n + PAD}>(worker, x, w, eps, y, rows);
  }});
}}
extern "C" void add_int8_{n}_{a}(int threads, const float* x, const float* residual,
                                 const float* w, float eps, float* sum, uint8_t* y, int rows) {{
  with_team(threads, [&](const Worker& worker) {{
    add_rms_norm_int8<{n}, {n + PAD}, {n + 1}, {n + 2}, {a}>(worker, x, residual, w, eps, sum, y,
                                                             rows);
  }});
}}
extern "C" void static_{n}_{a}(int threads, const float* x, const float* w, float eps, uint8_t* y,
                               int rows, const float* scales) {{
  with_team(threads, [&](const Worker& worker) {{
    rms_norm_int8<{n}, {a}, {n + PAD}, true>(worker, x, w, eps, y, rows, scales);
  }});
}}
extern "C" void add_static_{n}_{a}(int threads, const float* x, const float* residual,
                                   const float* w, float eps, float* sum, uint8_t* y, int rows,
                                   const float* scales) {{
  with_team(threads, [&](const Worker& worker) {{
    add_rms_norm_int8<{n}, {n + PAD}, {n + 1}, {n + 2}, {a}, true>(worker, x, residual, w, eps, sum,
                                                                   y, rows, scales);
  }});
}}
"""
    for n, a in INT8
)


@pytest.fixture(params=EACH_LEVEL)
def library(request: pytest.FixtureRequest, compiler: KernelCompiler) -> Library:
    return compiler.library(SOURCE, request.param)


def reference(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    groups = x.astype(np.float64).reshape(len(x), x.shape[1] // len(weight), len(weight))
    scale = 1 / np.sqrt((groups**2).mean(-1, keepdims=True) + EPS)
    return (groups * scale * weight).reshape(x.shape)


def rows_of(n: int, rows: int) -> np.ndarray:
    x = np.random.default_rng(n).standard_normal((13, n + PAD)).astype(np.float32)
    x[:, n:] = np.nan
    x[::2] *= 1e-3  # where eps matters
    return x[:rows].copy()


def weight_of(group: int) -> np.ndarray:
    return np.random.default_rng(group).uniform(0.5, 2, group).astype(np.float32)


@pytest.mark.parametrize(("n", "group"), SHAPES)
def test_rms_norm_of_each_group_is_within_rounding_of_float64(
    library: Library, n: int, group: int
) -> None:
    weight = weight_of(group)
    for rows in (0, 1, 2, 3, 13):
        x = rows_of(n, rows)
        y = np.full_like(x, 7.0)
        library.call(f"rms_norm_{n}_{group}", 2, x, weight, EPS, y, rows)
        # Mean of squares: at most group/16 + 6 roundings, halved by the root; then five more.
        rtol = (group / 32 + 8) * 2.0**-24
        np.testing.assert_allclose(y[:, :n], reference(x[:, :n], weight), rtol=rtol, atol=0)
        assert (y[:, n:] == 7.0).all()


@pytest.mark.parametrize("aliased", [False, True])
@pytest.mark.parametrize(("n", "group"), SHAPES)
def test_add_rms_norm_is_the_addition_and_then_the_norm(
    library: Library, n: int, group: int, aliased: bool
) -> None:
    weight = weight_of(n)
    for rows in (0, 1, 2, 13):
        x = rows_of(n, rows)
        residual = np.random.default_rng(9).standard_normal((rows, n)).astype(np.float32)
        total = x[:, :n] + residual
        result = residual if aliased else np.empty_like(residual)
        y = np.full_like(x, 7.0)
        name = f"add_rms_norm_{n}_{group}"
        library.call(name, 2, x, residual, weight, EPS, result, y, rows)
        np.testing.assert_array_equal(bits(result), bits(total))
        rtol = (n / 32 + 8) * 2.0**-24
        np.testing.assert_allclose(y[:, :n], reference(total, weight), rtol=rtol, atol=0)
        assert (y[:, n:] == 7.0).all()


@pytest.mark.parametrize(("n", "group"), SHAPES)
def test_norm_of_a_row_has_the_same_bits_in_any_batch_and_team(
    library: Library, n: int, group: int
) -> None:
    weight, x = weight_of(group), rows_of(n, 13)

    def run(rows: np.ndarray, threads: int) -> np.ndarray:
        y = np.zeros_like(rows)
        library.call(f"rms_norm_{n}_{group}", threads, rows, weight, EPS, y, len(rows))
        return bits(y)

    together = run(x, 1)
    np.testing.assert_array_equal(run(x, 3), together)
    for row in range(13):
        alone = run(x[row : row + 1].copy(), 2)
        np.testing.assert_array_equal(alone, together[row : row + 1])


def int8_rows_of(
    library: Library, x: np.ndarray, group: int, scales: np.ndarray | None = None
) -> np.ndarray:
    """What numpy makes of the fp32 kernel's own result."""
    rows, n = len(x), x.shape[1] - PAD
    normed = np.zeros((rows, n), np.float32)
    library.call(f"plain_{n}_{group}", 1, x, weight_of(n), EPS, normed, rows)
    assert np.isfinite(normed).all()
    return encode(*(quantise(normed, group) if scales is None else quantise_static(normed, scales)))


@pytest.mark.parametrize(("n", "group"), INT8)
def test_norm_as_int8_rows_is_the_rounded_norm(library: Library, n: int, group: int) -> None:
    for rows in (0, 1, 2, 13):
        x = rows_of(n, rows)
        expected = int8_rows_of(library, x, group)
        for threads in (1, 2, 3):
            y = np.zeros((rows + 1, expected.shape[1]), np.uint8)
            y[rows] = 7
            library.call(f"int8_{n}_{group}", threads, x, weight_of(n), EPS, y, rows)
            np.testing.assert_array_equal(y[:rows], expected)
            assert (y[rows] == 7).all()


@pytest.mark.parametrize(("n", "group"), INT8)
def test_norm_after_an_addition_as_int8_rows_is_the_rounded_norm_of_the_sum(
    library: Library, n: int, group: int
) -> None:
    for rows in (0, 1, 2, 13):
        x = rows_of(n, rows)
        residual = np.random.default_rng(9).standard_normal((rows, n + 1)).astype(np.float32)
        total = np.full((rows, n + 2), 7.0, np.float32)
        padded = np.zeros_like(x)
        padded[:, :n] = x[:, :n] + residual[:, :n]
        expected = int8_rows_of(library, padded, group)
        y = np.zeros((rows, expected.shape[1]), np.uint8)
        library.call(f"add_int8_{n}_{group}", 2, x, residual, weight_of(n), EPS, total, y, rows)
        np.testing.assert_array_equal(bits(total[:, :n]), bits(padded[:, :n].copy()))
        assert (total[:, n:] == 7.0).all()
        np.testing.assert_array_equal(y, expected)


@pytest.mark.parametrize(("n", "group"), INT8)
def test_an_int8_row_has_the_same_bytes_in_any_batch(library: Library, n: int, group: int) -> None:
    x = rows_of(n, 13)
    together = np.zeros((13, int8_rows_of(library, x, group).shape[1]), np.uint8)
    library.call(f"int8_{n}_{group}", 3, x, weight_of(n), EPS, together, 13)
    for row in range(13):
        alone = np.zeros_like(together[:1])
        library.call(f"int8_{n}_{group}", 2, x[row : row + 1].copy(), weight_of(n), EPS, alone, 1)
        np.testing.assert_array_equal(alone, together[row : row + 1])


def scales_of(n: int, group: int) -> np.ndarray:
    """So small that a part of a norm's values saturates."""
    return np.random.default_rng(n).uniform(0.005, 0.03, n // group).astype(np.float32)


@pytest.mark.parametrize(("n", "group"), INT8)
def test_norm_with_static_scales_is_rounded_by_them_in_any_batch_and_team(
    library: Library, n: int, group: int
) -> None:
    scales = scales_of(n, group)
    for rows in (0, 1, 2, 13):
        x = rows_of(n, rows)
        expected = int8_rows_of(library, x, group, scales)
        for threads in (1, 2, 3):
            y = np.zeros((rows + 1, expected.shape[1]), np.uint8)
            y[rows] = 7
            library.call(f"static_{n}_{group}", threads, x, weight_of(n), EPS, y, rows, scales)
            np.testing.assert_array_equal(y[:rows], expected)
            assert (y[rows] == 7).all()
        if rows:
            alone, last = np.zeros_like(expected[:1]), x[rows - 1 :].copy()
            library.call(f"static_{n}_{group}", 2, last, weight_of(n), EPS, alone, 1, scales)
            np.testing.assert_array_equal(alone, expected[rows - 1 :])
    assert (np.abs(expected[:, :n].view(np.int8)) == 127).sum() > rows


@pytest.mark.parametrize(("n", "group"), INT8)
def test_norm_after_an_addition_with_static_scales_is_rounded_by_them(
    library: Library, n: int, group: int
) -> None:
    scales = scales_of(n, group)
    for rows in (0, 1, 13):
        x = rows_of(n, rows)
        residual = np.random.default_rng(9).standard_normal((rows, n + 1)).astype(np.float32)
        total = np.full((rows, n + 2), 7.0, np.float32)
        padded = np.zeros_like(x)
        padded[:, :n] = x[:, :n] + residual[:, :n]
        expected = int8_rows_of(library, padded, group, scales)
        y = np.zeros((rows, expected.shape[1]), np.uint8)
        arguments = (x, residual, weight_of(n), EPS, total, y, rows, scales)
        library.call(f"add_static_{n}_{group}", 2, *arguments)
        np.testing.assert_array_equal(bits(total[:, :n]), bits(padded[:, :n].copy()))
        assert (total[:, n:] == 7.0).all()
        np.testing.assert_array_equal(y, expected)
