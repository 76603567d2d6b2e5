import numpy as np
import pytest
from int8_rows import encode, quantise, quantise_static
from kernel_harness import EACH_VECTOR_LEVEL, KernelCompiler, Library, bits

# (K, A)
SHAPES = [(32, 32), (96, 96), (160, 32), (192, 64), (576, 64), (576, 576)]
PAD = 3

SOURCE = '#include "linear/quantised.h"\n' + "".join(
    f"""
extern "C" int bytes_{k}_{a}() {{ return Int8Row<{k}, {a}>::BYTES; }}
extern "C" void quantise_{k}_{a}(int threads, const float* x, uint8_t* y, int rows) {{
  with_team(threads, [&](const Worker& worker) {{
    quantise_rows<{k}, {a}, {k + PAD}>(worker, x, y, rows);
  }});
}}
extern "C" void quantise_group_{k}_{a}(const float* x, int group, uint8_t* row) {{
  quantise_group<{k}, {a}>(x, group, row);
}}
extern "C" void static_{k}_{a}(int threads, const float* x, uint8_t* y, int rows,
                               const float* scales) {{
  with_team(threads, [&](const Worker& worker) {{
    quantise_rows<{k}, {a}, {k + PAD}, true>(worker, x, y, rows, scales);
  }});
}}
"""
    for k, a in SHAPES
)


@pytest.fixture(params=EACH_VECTOR_LEVEL)
def library(request: pytest.FixtureRequest, compiler: KernelCompiler) -> Library:
    return compiler.library(SOURCE, request.param)


def run(
    library: Library,
    x: np.ndarray,
    group: int,
    threads: int = 1,
    scales: np.ndarray | None = None,
) -> np.ndarray:
    """The rows' bytes; with scales, those of static ones."""
    rows, k = x.shape
    padded = np.full((rows, k + PAD), np.nan, np.float32)
    padded[:, :k] = x
    y = np.zeros((rows + 1, library.call(f"bytes_{k}_{group}")), np.uint8)
    y[rows] = 7
    if scales is None:
        library.call(f"quantise_{k}_{group}", threads, padded, y, rows)
    else:
        library.call(f"static_{k}_{group}", threads, padded, y, rows, scales)
    assert (y[rows] == 7).all(), "bytes past the rows were written"
    return y[:rows]


@pytest.mark.parametrize(("k", "group"), SHAPES)
def test_rows_have_the_bytes_of_numpy(library: Library, k: int, group: int) -> None:
    rng = np.random.default_rng(k + group)
    for rows in (0, 1, 2, 7):
        x = rng.standard_normal((rows, k)).astype(np.float32) * np.float32(10.0 ** rng.integers(9))
        for threads in (1, 3):
            expected = encode(*quantise(x, group))
            np.testing.assert_array_equal(run(library, x, group, threads), expected)


@pytest.mark.parametrize(("k", "group"), SHAPES)
def test_halves_are_rounded_to_even(library: Library, k: int, group: int) -> None:
    x = (np.arange(k, dtype=np.float32) % 16 - 7.5)[None]
    x[:, ::group] = 127
    codes = run(library, x, group)[0, :k].view(np.int8)
    nearest_even = 2 * np.round(x[0].astype(np.int32) / 2 + np.sign(x[0]) / 8).astype(np.int32)
    nearest_even[::group] = 127
    np.testing.assert_array_equal(codes, nearest_even)


@pytest.mark.parametrize(("k", "group"), SHAPES)
def test_a_group_written_alone_has_the_bytes_that_the_row_has(
    library: Library, k: int, group: int
) -> None:
    x = np.random.default_rng(k).standard_normal((1, k)).astype(np.float32)
    whole, row = run(library, x, group), np.zeros((1, library.call(f"bytes_{k}_{group}")), np.uint8)
    for i in reversed(range(k // group)):
        values = np.ascontiguousarray(x[0, i * group : (i + 1) * group])
        library.call(f"quantise_group_{k}_{group}", values, i, row)
    np.testing.assert_array_equal(row, whole)


def test_groups_of_zeros_or_of_almost_nothing_have_zero_codes(library: Library) -> None:
    x = np.zeros((1, 160), np.float32)
    x[0, 32:64], x[0, 64:96], x[0, 96:128] = -0.0, 1e-40, 3.7e-37
    row = run(library, x, 32)
    np.testing.assert_array_equal(row, encode(*quantise(x, 32)))
    assert not row[0, :96].any()
    assert not row[0, 160:168].any(), "the scale of zeros isn't 0"
    assert not row[0, 128:160].any()


@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
def test_what_is_no_number_makes_its_group_none_and_no_other(library: Library, bad: float) -> None:
    x = np.ones((1, 160), np.float32)
    for column in (32, 47, 63):
        x[0, 32:64] = 2
        x[0, column] = bad
        row = run(library, x, 32)
        scales, scaled_sums = row[0, 160:180].view(np.float32), row[0, 200:220].view(np.float32)
        assert not np.isfinite(scales[1])
        assert np.isnan(scaled_sums[1])
        others = np.delete(scales, 1)
        np.testing.assert_array_equal(bits(others), bits(np.full(4, np.float32(1) / 127)))
        assert (np.delete(row[0, :160].reshape(5, 32), 1, axis=0) == 127).all()


def static_scales(k: int, group: int) -> np.ndarray:
    return np.random.default_rng(k).uniform(0.001, 0.02, k // group).astype(np.float32)


@pytest.mark.parametrize(("k", "group"), SHAPES)
def test_static_rows_have_the_bytes_of_numpy(library: Library, k: int, group: int) -> None:
    """Alone and together, with any team; some values lie beyond 127 scales."""
    rng, scales = np.random.default_rng(k + group), static_scales(k, group)
    for rows in (0, 1, 2, 7):
        x = rng.standard_normal((rows, k)).astype(np.float32) * 3
        expected = encode(*quantise_static(x, scales))
        for threads in (1, 3):
            np.testing.assert_array_equal(run(library, x, group, threads, scales), expected)
        for row in range(rows):
            alone = run(library, x[row : row + 1], group, 2, scales)
            np.testing.assert_array_equal(alone, expected[row : row + 1])


@pytest.mark.parametrize(("k", "group"), SHAPES)
def test_a_static_code_is_the_nearest_within_127_scales(
    library: Library, k: int, group: int
) -> None:
    """By a loop in float64: no further than half a scale, but for the reciprocal's rounding."""
    scales = static_scales(k, group)
    x = np.random.default_rng(k).standard_normal((3, k)).astype(np.float32) * 3
    codes = run(library, x, group, 1, scales)[:, :k].view(np.int8)
    saturated = 0
    for row, column in np.ndindex(x.shape):
        exact = float(x[row, column]) / float(scales[column // group])
        saturated += abs(exact) > 127.5
        nearest = min(max(exact, -127.0), 127.0)
        assert abs(int(codes[row, column]) - nearest) <= 0.5 + 127 * 2.0**-22
    assert 0 < saturated < x.size


def test_static_halves_are_rounded_to_even(library: Library) -> None:
    x = np.tile(np.array([0.5, 1.5, -0.5, -2.5, 126.5, -127.5, 127, 128], np.float32), 4)[None]
    codes = run(library, x / 4, 32, 1, np.array([0.25], np.float32))[0, :32].view(np.int8)
    np.testing.assert_array_equal(codes, [0, 2, 0, -2, 126, -127, 127, 127] * 4)


def test_static_codes_saturate_at_127_scales(library: Library) -> None:
    """Far beyond what an int32 holds, too, and at infinity."""
    scales = np.array([0.5, 2.0**-100, 1.0, 1e-38, 3e38], np.float32)
    x = np.zeros((1, 160), np.float32)
    x[0, :5] = 1e9, -1e30, np.inf, -np.inf, 63.7
    x[0, 32:34], x[0, 96], x[0, 128:130] = (3e38, -3e38), 1e-36, (3e38, np.inf)
    row = run(library, x, 32, 1, scales)
    codes = row[0, :160].view(np.int8)
    np.testing.assert_array_equal(codes[:5], [127, -127, 127, -127, 127])
    np.testing.assert_array_equal(codes[[32, 33, 96, 128, 129]], [127, -127, 100, 1, 127])
    assert np.count_nonzero(codes) == 10
    np.testing.assert_array_equal(row[0, 160:180].view(np.float32), scales)


def test_a_nan_makes_its_static_group_none_and_no_other(library: Library) -> None:
    scales = static_scales(160, 32)
    for column in (32, 47, 63):
        x = np.ones((1, 160), np.float32)
        clean = run(library, x, 32, 1, scales)
        x[0, column] = np.nan
        row = run(library, x, 32, 1, scales)
        found, scaled_sums = row[0, 160:180].view(np.float32), row[0, 200:220].view(np.float32)
        assert np.isnan(found[1])
        assert np.isnan(scaled_sums[1])
        np.testing.assert_array_equal(np.delete(found, 1), np.delete(scales, 1))
        others = np.delete(row[0, :160].reshape(5, 32), 1, axis=0)
        np.testing.assert_array_equal(others, np.delete(clean[0, :160].reshape(5, 32), 1, axis=0))
