import numpy as np
import pytest
from int8_rows import encode, quantise
from kernel_harness import LEVELS, KernelCompiler, Library, bits

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
"""
    for k, a in SHAPES
)


@pytest.fixture(params=LEVELS)
def library(request: pytest.FixtureRequest, compiler: KernelCompiler) -> Library:
    return compiler.library(SOURCE, request.param)


def run(library: Library, x: np.ndarray, group: int, threads: int = 1) -> np.ndarray:
    rows, k = x.shape
    padded = np.full((rows, k + PAD), np.nan, np.float32)
    padded[:, :k] = x
    y = np.zeros((rows + 1, library.call(f"bytes_{k}_{group}")), np.uint8)
    y[rows] = 7
    library.call(f"quantise_{k}_{group}", threads, padded, y, rows)
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
