"""Experts' quantised linears against those of single matrices, bit for bit: what these compute is
held to float64 in tests/plugins/linear."""

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import pytest
from int8_rows import encode, quantise
from kernel_harness import EACH_VECTOR_LEVEL, KernelCompiler, Library, bits

from llmbuild.builder.targets.cpu.pack_quantised import pack_quantised
from llmbuild.quant.grid import QuantisedMatrix, WeightGrid

E = 5


@dataclass(frozen=True)
class Case:
    """Experts' matrices [n, k] on a grid, of activations in groups of `a`."""

    grid: WeightGrid
    n: int
    k: int
    a: int

    @property
    def name(self) -> str:
        kind = "sym" if self.grid.symmetric else "zero" if self.grid.zero_points else "asym"
        return f"int{self.grid.bits}_{self.grid.group_size}_{kind}_{self.n}x{self.k}"

    @property
    def cpp_grid(self) -> str:
        asymmetric = str(not self.grid.symmetric).lower()
        zero_points = str(self.grid.zero_points).lower()
        return (
            f"Grid<{self.grid.bits}, {self.grid.columns_of(self.k)}, {asymmetric}, {zero_points}>"
        )


CASES = [
    Case(WeightGrid(4, 64, True), 49, 192, 64),
    Case(WeightGrid(4, 32, False), 1, 32, 32),
    Case(WeightGrid(8, 0, True), 33, 96, 32),
    Case(WeightGrid(4, 96, False, zero_points=True), 17, 288, 96),
]
cases = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)

SOURCE = '#include "moe/cpu.h"\n' + "".join(
    f"""
using Grid_{c.name} = {c.cpp_grid};
extern "C" void moe_int8_{c.name}(int threads, const uint8_t* x, const uint8_t* w,
                                  const int32_t* starts, float* y) {{
  with_team(threads, [&](const Worker& worker) {{
    moe_int8_linear<Grid_{c.name}, {E}, {c.n}, {c.k}, {c.a}>(worker, x, w, starts, y);
  }});
}}
extern "C" void moe_fp32_{c.name}(int threads, const float* x, const uint8_t* w,
                                  const int32_t* starts, float* y) {{
  with_team(threads, [&](const Worker& worker) {{
    moe_dequantised_linear<Grid_{c.name}, {E}, {c.n}, {c.k}>(worker, x, w, starts, y);
  }});
}}
extern "C" void int8_{c.name}(int threads, const uint8_t* x, const uint8_t* w, float* y,
                              int rows) {{
  with_team(threads, [&](const Worker& worker) {{
    int8_linear<Grid_{c.name}, {c.n}, {c.k}, {c.a}, {c.n}>(worker, x, w, nullptr, y, rows);
  }});
}}
extern "C" void fp32_{c.name}(int threads, const float* x, const uint8_t* w, float* y, int rows) {{
  with_team(threads, [&](const Worker& worker) {{
    dequantised_linear<Grid_{c.name}, {c.n}, {c.k}, {c.k}, {c.n}>(worker, x, w, nullptr, y, rows);
  }});
}}
"""
    for c in CASES
)
SOURCE += """
extern "C" void gather(int threads, const float* x, const int32_t* rows_of, float* slots,
                       const uint8_t* bytes, uint8_t* byte_slots, int count) {
  with_team(threads, [&](const Worker& worker) {
    moe_gather<6, 7>(worker, x, rows_of, slots, count);
    moe_gather<6, 6>(worker, bytes, rows_of, byte_slots, count);
  });
}
"""


@pytest.fixture(params=EACH_VECTOR_LEVEL)
def library(request: pytest.FixtureRequest, compiler: KernelCompiler) -> Library:
    return compiler.library(SOURCE, request.param)


def random_stack(case: Case, rng: np.random.Generator) -> QuantisedMatrix:
    grid, groups = case.grid, (E, case.n, case.k // case.grid.columns_of(case.k))
    top = 1 << grid.bits
    return QuantisedMatrix(
        grid,
        rng.integers(0, top, (E, case.n, case.k), dtype=np.uint8),
        rng.uniform(-0.01, 0.01, groups).astype(np.float16),
        rng.uniform(-0.1, 0.1, groups).astype(np.float16) if grid.has_minima else None,
        rng.integers(0, top, groups, dtype=np.uint8) if grid.zero_points else None,
    )


def packed(matrix: QuantisedMatrix) -> np.ndarray:
    return np.concatenate(list(pack_quantised(matrix)))


# Slots of each expert: one alone, none of most, uneven with an idle one, all alike.
COUNTS = [(1, 0, 0, 0, 0), (0, 0, 23, 0, 0), (3, 0, 9, 1, 17), (4, 4, 4, 4, 4), (0, 0, 0, 0, 0)]


@pytest.mark.parametrize("kernel", ["int8", "fp32"])
@cases
def test_every_slot_has_the_bits_of_its_experts_own_linear(
    library: Library, case: Case, kernel: str
) -> None:
    rng = np.random.default_rng(case.n)
    stack = random_stack(case, rng)
    whole = packed(stack)
    for counts in COUNTS:
        starts = np.cumsum([0, *counts]).astype(np.int32)
        x = rng.standard_normal((max(1, starts[-1]), case.k)).astype(np.float32)
        rows = encode(*quantise(x, case.a)) if kernel == "int8" else x
        for threads in (1, 2, 3):
            y = np.full((len(x), case.n), 7.0, np.float32)
            library.call(f"moe_{kernel}_{case.name}", threads, rows, whole, starts, y)
            for expert, (begin, end) in enumerate(pairwise(starts)):
                alone = np.empty((end - begin, case.n), np.float32)
                own = packed(stack.take_rows(expert))
                mine = np.ascontiguousarray(rows[begin:end])
                library.call(f"{kernel}_{case.name}", 2, mine, own, alone, len(alone))
                np.testing.assert_array_equal(bits(y[begin:end]), bits(alone))
            assert (y[starts[-1] :] == 7.0).all(), "rows past the last slot were written"


def test_slots_take_their_tokens_rows_of_floats_and_of_bytes(library: Library) -> None:
    rng = np.random.default_rng(0)
    x = rng.standard_normal((9, 7)).astype(np.float32)
    encoded = rng.integers(0, 256, (9, 24), dtype=np.uint8)
    rows_of = rng.integers(0, 9, 31, dtype=np.int32)
    slots, byte_slots = np.empty((31, 6), np.float32), np.empty((31, 24), np.uint8)
    library.call("gather", 3, x, rows_of, slots, encoded, byte_slots, 31)
    np.testing.assert_array_equal(slots, x[rows_of, :6])
    np.testing.assert_array_equal(byte_slots, encoded[rows_of])
