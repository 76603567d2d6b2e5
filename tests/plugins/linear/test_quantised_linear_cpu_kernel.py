from dataclasses import dataclass

import numpy as np
import pytest
from int8_rows import encode, quantise
from kernel_harness import EACH_VECTOR_LEVEL, LEVELS, KernelCompiler, Library, bits

from llmbuild.builder.targets.cpu.pack_quantised import pack_quantised
from llmbuild.quant.grid import QuantisedMatrix, WeightGrid

ROWS = [0, 1, 2, 3, 5, 8, 9, 13, 67]
PAD_X, PAD_Y = 3, 5


@dataclass(frozen=True)
class Case:
    """A linear [n, k] on a grid, of activations in groups of `a`. group 0: one a row."""

    bits: int
    group: int
    symmetric: bool
    n: int
    k: int
    a: int
    zero_points: bool = False

    @property
    def name(self) -> str:
        kind = "sym" if self.symmetric else "zero" if self.zero_points else "asym"
        return f"int{self.bits}_{self.group}_{kind}_{self.n}x{self.k}_{self.a}"

    @property
    def grid(self) -> WeightGrid:
        return WeightGrid(self.bits, self.group, self.symmetric, self.zero_points)

    @property
    def width(self) -> int:
        return self.group or self.k


CASES = [
    Case(4, 32, False, 1, 32, 32),
    Case(4, 32, False, 65, 576, 64),
    Case(4, 32, True, 17, 96, 96),
    Case(4, 64, True, 49, 576, 32),
    Case(4, 64, True, 16, 128, 64),
    Case(4, 128, False, 17, 384, 64),
    Case(4, 192, True, 33, 576, 64),
    Case(4, 0, False, 17, 160, 32),
    Case(8, 0, True, 65, 576, 64),
    Case(8, 0, True, 7, 160, 160),
    Case(8, 32, True, 33, 576, 32),
    Case(8, 64, False, 17, 192, 192),
    Case(4, 64, False, 33, 192, 32, zero_points=True),
    Case(4, 0, False, 1, 96, 96, zero_points=True),
    Case(8, 32, False, 17, 160, 32, zero_points=True),
]
cases = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)

SOURCE = '#include "linear/quantised.h"\n' + "".join(
    f"""
using Grid_{c.name} = Grid<{c.bits}, {c.width}, {str(not c.symmetric).lower()},
                           {str(c.zero_points).lower()}>;
extern "C" void int8_{c.name}(int threads, const uint8_t* x, const uint8_t* w, const float* bias,
                              float* y, int rows) {{
  with_team(threads, [&](const Worker& worker) {{
    int8_linear<Grid_{c.name}, {c.n}, {c.k}, {c.a}, {c.n + PAD_Y}>(worker, x, w, bias, y, rows);
  }});
}}
extern "C" void fp32_{c.name}(int threads, const float* x, const uint8_t* w, const float* bias,
                              float* y, int rows) {{
  with_team(threads, [&](const Worker& worker) {{
    dequantised_linear<Grid_{c.name}, {c.n}, {c.k}, {c.k + PAD_X}, {c.n + PAD_Y}>(
        worker, x, w, bias, y, rows);
  }});
}}
"""
    for c in CASES
)


@pytest.fixture(params=EACH_VECTOR_LEVEL)
def library(request: pytest.FixtureRequest, compiler: KernelCompiler) -> Library:
    return compiler.library(SOURCE, request.param)


def random_matrix(case: Case, rng: np.random.Generator) -> QuantisedMatrix:
    groups = (case.n, case.k // case.width)
    return QuantisedMatrix(
        case.grid,
        rng.integers(0, 1 << case.bits, (case.n, case.k), dtype=np.uint8),
        rng.uniform(-0.01, 0.01, groups).astype(np.float16),
        rng.uniform(-0.1, 0.1, groups).astype(np.float16) if case.grid.has_minima else None,
        rng.integers(0, 1 << case.bits, groups, dtype=np.uint8) if case.zero_points else None,
    )


def random_rows(case: Case, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    return quantise(rng.standard_normal((max(ROWS), case.k)).astype(np.float32), case.a)


def run(
    library: Library,
    kernel: str,
    case: Case,
    x: np.ndarray,
    packed: np.ndarray,
    bias: np.ndarray | None,
    threads: int = 2,
) -> np.ndarray:
    y = np.full((len(x), case.n + PAD_Y), 7.0, np.float32)
    library.call(f"{kernel}_{case.name}", threads, x, packed, bias, y, len(x))
    assert (y[:, case.n :] == 7.0).all(), "columns past N were written"
    return y[:, : case.n]


def packed_bytes(matrix: QuantisedMatrix) -> np.ndarray:
    return np.concatenate(list(pack_quantised(matrix)))


@cases
def test_dots_of_whole_numbers_are_exact(library: Library, case: Case) -> None:
    """Scales of one, and sums below 2^24, which fp32 holds; the largest codes of both signs."""
    rng = np.random.default_rng(case.k)
    top = (1 << case.bits) - 1
    k = min(case.k, 448)
    codes = rng.integers(0, top + 1, (case.n, case.k), dtype=np.uint8)
    codes[:, k:] = 0 if not case.symmetric else case.grid.zero
    codes[0, :k] = top
    codes[-1, :k] = 0 if case.n > 1 else top
    groups = (case.n, case.k // case.width)
    minima = rng.integers(-9, 9, groups).astype(np.float16) if case.grid.has_minima else None
    zeros = None
    if case.zero_points:
        zeros = rng.integers(0, top + 1, groups, dtype=np.uint8)
    matrix = QuantisedMatrix(case.grid, codes, np.ones(groups, np.float16), minima, zeros)
    x = rng.integers(-127, 128, (13, case.k)).astype(np.int8)
    x[0], x[1], x[2] = 127, -127, np.where(np.arange(case.k) % 2, 127, -127)
    row_bytes = encode(x, np.ones((13, case.k // case.a), np.float32))
    weights = codes.astype(np.int64) - (case.grid.zero if case.symmetric else 0)
    if minima is not None:
        weights += np.repeat(minima.astype(np.int64), case.width, axis=1)
    if zeros is not None:
        weights -= np.repeat(zeros.astype(np.int64), case.width, axis=1)
    expected = x.astype(np.int64) @ weights.T
    assert np.abs(expected).max() < 2**24
    got = run(library, "int8", case, row_bytes, packed_bytes(matrix), None)
    np.testing.assert_array_equal(got, expected)


@cases
def test_int8_linear_is_within_the_rounding_bound_of_float64(library: Library, case: Case) -> None:
    rng = np.random.default_rng(case.n)
    matrix, (codes, scales) = random_matrix(case, rng), random_rows(case, rng)
    bias = rng.standard_normal(case.n).astype(np.float32)
    x = codes * np.repeat(scales.astype(np.float64), case.a, axis=1)
    exact = x @ dequantised(matrix).T
    bound = np.abs(x) @ magnitudes(matrix).T + 10
    steps = 3 * case.k // 32 + 8
    for given in (None, bias):
        got = run(library, "int8", case, encode(codes, scales), packed_bytes(matrix), given)
        error = np.abs(got - exact - (0 if given is None else given))
        assert (error <= steps * 2.0**-24 * bound).all()


def dequantised(matrix: QuantisedMatrix) -> np.ndarray:
    width = matrix.grid.columns_of(matrix.codes.shape[1])
    scales = np.repeat(matrix.scales.astype(np.float64), width, axis=1)
    if matrix.zeros is not None:
        return (matrix.codes - np.repeat(matrix.zeros.astype(np.float64), width, axis=1)) * scales
    if matrix.minima is None:
        return (matrix.codes.astype(np.float64) - matrix.grid.zero) * scales
    return matrix.codes * scales + np.repeat(matrix.minima.astype(np.float64), width, axis=1)


def magnitudes(matrix: QuantisedMatrix) -> np.ndarray:
    """Of what is added up for a weight: the parts of an asymmetric one may cancel."""
    width = matrix.grid.columns_of(matrix.codes.shape[1])
    if matrix.zeros is not None:
        scales, zeros = (
            np.repeat(np.abs(field.astype(np.float64)), width, axis=1)
            for field in (matrix.scales, matrix.zeros)
        )
        return (matrix.codes + zeros) * scales
    if matrix.minima is None:
        return np.abs(dequantised(matrix))
    scales, minima = (
        np.repeat(np.abs(field.astype(np.float64)), width, axis=1)
        for field in (matrix.scales, matrix.minima)
    )
    return matrix.codes * scales + minima


@cases
def test_dequantised_linear_has_the_rounding_of_one_chain_over_float32_weights(
    library: Library, case: Case
) -> None:
    rng = np.random.default_rng(case.n)
    matrix = random_matrix(case, rng)
    x = rng.standard_normal((max(ROWS), case.k + PAD_X)).astype(np.float32)
    x[:, case.k :] = np.nan
    weight = dequantised(matrix).astype(np.float32).astype(np.float64)
    bias = rng.standard_normal(case.n).astype(np.float32)
    exact = x[:, : case.k].astype(np.float64) @ weight.T
    bound = np.abs(x[:, : case.k]).astype(np.float64) @ np.abs(weight).T + 10
    for given in (None, bias):
        got = run(library, "fp32", case, x, packed_bytes(matrix), given)
        error = np.abs(got - exact - (0 if given is None else given))
        assert (error <= (case.k + 2) * 2.0**-24 * bound).all()


@pytest.mark.parametrize("kernel", ["int8", "fp32"])
@cases
def test_a_row_has_the_same_bits_in_any_batch_and_team(
    library: Library, case: Case, kernel: str
) -> None:
    rng = np.random.default_rng(case.k)
    packed = packed_bytes(random_matrix(case, rng))
    if kernel == "int8":
        x = encode(*random_rows(case, rng))
    else:
        x = rng.standard_normal((max(ROWS), case.k + PAD_X)).astype(np.float32)
    bias = rng.standard_normal(case.n).astype(np.float32)
    together = run(library, kernel, case, x, packed, bias, threads=1)
    for threads in (2, 3):
        again = run(library, kernel, case, x, packed, bias, threads)
        np.testing.assert_array_equal(bits(again), bits(together))
    for rows in ROWS:
        first = run(library, kernel, case, x[:rows], packed, bias)
        np.testing.assert_array_equal(bits(first), bits(together[:rows]))
    for row in range(0, len(x), 11):
        alone = run(library, kernel, case, x[row : row + 1], packed, bias)
        np.testing.assert_array_equal(bits(alone), bits(together[row : row + 1]))


@cases
def test_all_levels_with_fused_multiply_adds_give_the_same_bits(
    compiler: KernelCompiler, case: Case
) -> None:
    rng = np.random.default_rng(case.n)
    packed, x = packed_bytes(random_matrix(case, rng)), encode(*random_rows(case, rng))
    results = [
        bits(run(compiler.library(SOURCE, level), "int8", case, x, packed, None))
        for level in LEVELS
        if level != "x86-64"
    ]
    for result in results[1:]:
        np.testing.assert_array_equal(result, results[0])
