import numpy as np
import pytest
import torch
from kernel_harness import DTYPES, EACH_LEVEL, KernelCompiler, Library, bits

# (E, TOP_K): nth_element and sort, except (64, 1) and (128, 2), which torch sorts partially.
ROUTES = [(1, 1), (4, 2), (7, 3), (8, 8), (60, 4), (64, 1), (64, 8), (128, 2), (33, 17)]
E, TOP_K = 7, 3
# (N, K) of an expert's linear, 2049 crosses its K block.
LINEARS = [(1, 1), (17, 33), (40, 2049)]
PAD = 3
SCORINGS = {
    "probabilities": "Softmax, false",
    "normalised": "Softmax, true",
    "chosen": "TopKSoftmax, false",
}
ALL = [("chosen", *route) for route in ROUTES]
ALL += [(name, *route) for name in ("probabilities", "normalised") for route in ((8, 8), (60, 4))]

SOURCE = '#include "moe/cpu.h"\n' + "".join(
    f"""
extern "C" void route_{name}_{experts}_{top_k}(int threads, const float* logits, int32_t* experts,
                                               float* weights, int rows) {{
  with_team(threads, [&](const Worker& worker) {{
    moe_route<{experts}, {top_k}, {SCORINGS[name]}, {experts + PAD}>(
        worker, logits, experts, weights, rows);
  }});
}}
"""
    for name, experts, top_k in ALL
)
SOURCE += f"""
extern "C" void sort_slots(int threads, const int32_t* experts, int32_t* starts, int32_t* rows_of,
                           int32_t* slot_of, int rows) {{
  with_team(threads, [&](const Worker& worker) {{
    moe_sort<{E}, {TOP_K}>(worker, experts, starts, rows_of, slot_of, rows);
  }});
}}
"""
SOURCE += "".join(
    f"""
// The slots' outputs, and for every token their weighted sum.
extern "C" void experts_{weight}_{n}_{k}(int threads, const float* x, const {weight}* w,
                                         const int32_t* starts, const int32_t* rows_of,
                                         const int32_t* slot_of, const float* weights,
                                         float* sorted, float* outputs, float* y, int rows) {{
  with_team(threads, [&](const Worker& worker) {{
    moe_gather<{k}, {k + PAD}>(worker, x, rows_of, sorted, rows * {TOP_K});
    worker.barrier();
    moe_linear<{weight}, {E}, {n}, {k}>(worker, sorted, w, starts, outputs);
    worker.barrier();
    moe_combine<{n}, {TOP_K}, {n + PAD}>(worker, outputs, slot_of, weights, y, rows);
  }});
}}
"""
    for weight in DTYPES
    for n, k in LINEARS
)


@pytest.fixture(params=EACH_LEVEL)
def library(request: pytest.FixtureRequest, compiler: KernelCompiler) -> Library:
    return compiler.library(SOURCE, request.param)


def route(
    library: Library, logits: np.ndarray, top_k: int, scoring: str, threads: int = 2
) -> tuple[np.ndarray, np.ndarray]:
    rows, experts = logits.shape
    padded = np.full((rows, experts + PAD), np.nan, np.float32)
    padded[:, :experts] = logits
    chosen, weights = np.full((rows, top_k), -1, np.int32), np.empty((rows, top_k), np.float32)
    name = f"route_{scoring}_{experts}_{top_k}"
    library.call(name, threads, padded, chosen, weights, rows)
    return chosen, weights


def logits_of(experts: int, rows: int) -> np.ndarray:
    return np.random.default_rng(experts).normal(0, 2, (rows, experts)).astype(np.float32)


@pytest.mark.parametrize(("scoring", "experts", "top_k"), ALL)
def test_route_takes_the_best_experts_and_weighs_them_as_float64(
    library: Library, scoring: str, experts: int, top_k: int
) -> None:
    for rows in (0, 1, 13):
        logits = logits_of(experts, rows)
        chosen, weights = route(library, logits, top_k, scoring)
        best = np.argsort(-logits, axis=1, kind="stable")[:, :top_k]
        np.testing.assert_array_equal(chosen, best)
        exact = np.exp(logits.astype(np.float64))
        kept = np.take_along_axis(exact, best, 1)
        total = exact if scoring == "probabilities" else kept
        np.testing.assert_allclose(weights, kept / total.sum(1, keepdims=True), rtol=3e-6, atol=0)


def tied_logits(experts: int) -> np.ndarray:
    """Rows of one to nine different values; the first 400 are all equal."""
    rng = np.random.default_rng(experts)
    tied = [rng.integers(0, levels, (400, experts)) for levels in (1, 2, 3, 5, 9)]
    return np.concatenate(tied).astype(np.float32)


@pytest.mark.parametrize(("experts", "top_k"), ROUTES)
def test_ties_and_nans_of_logits_fall_as_in_torch(
    library: Library, experts: int, top_k: int
) -> None:
    logits = tied_logits(experts)
    with_nan = logits[-400:].copy()
    with_nan[np.random.default_rng(0).random(with_nan.shape) < 0.2] = np.nan
    for given in (logits, with_nan):
        chosen, _ = route(library, given, top_k, "chosen")
        expected = torch.from_numpy(given).topk(top_k, dim=-1, sorted=True).indices
        np.testing.assert_array_equal(chosen, expected)


@pytest.mark.parametrize("scoring", ["probabilities", "normalised"])
def test_ties_of_probabilities_fall_as_in_torch(library: Library, scoring: str) -> None:
    logits = tied_logits(60)
    chosen, _ = route(library, logits, 4, scoring)
    probabilities = torch.softmax(torch.from_numpy(logits), -1)
    np.testing.assert_array_equal(chosen, probabilities.topk(4, dim=-1, sorted=True).indices)


@pytest.mark.parametrize("scoring", SCORINGS)
def test_route_of_a_token_has_the_same_bits_in_any_batch_and_team(
    library: Library, scoring: str
) -> None:
    logits = logits_of(60, 13)
    chosen, weights = route(library, logits, 4, scoring, 1)
    again = route(library, logits, 4, scoring, 3)
    np.testing.assert_array_equal(again[0], chosen)
    np.testing.assert_array_equal(bits(again[1]), bits(weights))
    for row in range(13):
        alone = route(library, logits[row : row + 1], 4, scoring)
        np.testing.assert_array_equal(alone[0][0], chosen[row])
        np.testing.assert_array_equal(bits(alone[1][0]), bits(weights[row]))


def choices_of(rows: int, kind: str) -> np.ndarray:
    """Experts [rows, TOP_K], distinct in a row: of all, never 2 and 5, or the same for all."""
    pool = {"any": np.arange(E), "some": np.array([0, 1, 3, 4, 6]), "same": np.array([4, 1, 6])}
    rng = np.random.default_rng(rows)
    picks = [rng.permutation(pool[kind])[:TOP_K] for _ in range(rows)]
    return np.array(picks, np.int32).reshape(rows, TOP_K)


def sort_slots(library: Library, chosen: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rows = len(chosen)
    starts, rows_of = np.full(E + 1, -1, np.int32), np.full(rows * TOP_K, -1, np.int32)
    slot_of = np.full((rows, TOP_K), -1, np.int32)
    library.call("sort_slots", 2, chosen, starts, rows_of, slot_of, rows)
    return starts, rows_of, slot_of


@pytest.mark.parametrize("kind", ["any", "some", "same"])
@pytest.mark.parametrize("rows", [0, 1, 2, 13, 97])
def test_slots_are_sorted_by_expert_and_then_by_token(
    library: Library, rows: int, kind: str
) -> None:
    chosen = choices_of(rows, kind)
    starts, rows_of, slot_of = sort_slots(library, chosen)
    counts = np.bincount(chosen.ravel(), minlength=E)
    np.testing.assert_array_equal(starts, np.cumsum([0, *counts]))
    order = np.argsort(chosen.ravel(), kind="stable")
    np.testing.assert_array_equal(rows_of, order // TOP_K)
    np.testing.assert_array_equal(slot_of.ravel()[order], np.arange(rows * TOP_K))


class Experts:
    """Inputs of the experts' linears; experts that no token chose have weights of NaN."""

    def __init__(self, n: int, k: int, dtype: str, rows: int, kind: str) -> None:
        rng = np.random.default_rng(n * 1000 + k)
        self.n, self.k, self.dtype = n, k, dtype
        self.chosen = choices_of(rows, kind)
        self.x = rng.standard_normal((rows, k + PAD)).astype(np.float32)
        self.x[:, k:] = np.nan
        self.weights = rng.uniform(-1, 1, (rows, TOP_K)).astype(np.float32)
        self.matrices = rng.standard_normal((E, n, k)).astype(DTYPES[dtype])
        self.matrices[np.setdiff1d(np.arange(E), self.chosen)] = np.nan

    def run(self, library: Library, rows: slice = slice(None), threads: int = 2) -> np.ndarray:
        tiles = -(-self.n // 16)
        packed = np.zeros((E, tiles * 16, self.k), self.matrices.dtype)
        packed[:, : self.n] = self.matrices
        packed = packed.reshape(E, tiles, 16, self.k).transpose(0, 1, 3, 2).copy()
        x, weights, chosen = self.x[rows].copy(), self.weights[rows].copy(), self.chosen[rows]
        starts, rows_of, slot_of = sort_slots(library, chosen.copy())
        buffers = [np.full((len(x) * TOP_K, w), np.nan, np.float32) for w in (self.k, self.n)]
        y = np.full((len(x), self.n + PAD), 7.0, np.float32)
        inputs = (x, packed, starts, rows_of, slot_of, weights)
        name = f"experts_{self.dtype}_{self.n}_{self.k}"
        library.call(name, threads, *inputs, *buffers, y, len(x))
        assert (y[:, self.n :] == 7.0).all()
        return y[:, : self.n]

    def check_against_float64(self, y: np.ndarray) -> None:
        for t, experts in enumerate(self.chosen):
            x = self.x[t, : self.k].astype(np.float64)
            exact, bound = np.zeros(self.n), np.zeros(self.n)
            for weight, expert in zip(self.weights[t].astype(np.float64), experts, strict=True):
                matrix = self.matrices[expert].astype(np.float64)
                exact += weight * (matrix @ x)
                bound += np.abs(weight) * (np.abs(matrix) @ np.abs(x))
            assert (np.abs(y[t] - exact) <= (self.k + 8) * 2.0**-24 * bound).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["any", "some", "same"])
@pytest.mark.parametrize(("n", "k"), LINEARS)
def test_chosen_experts_outputs_are_weighted_and_added(
    library: Library, n: int, k: int, kind: str, dtype: str
) -> None:
    for rows in (0, 1, 2, 23):
        case = Experts(n, k, dtype, rows, kind)
        case.check_against_float64(case.run(library))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("n", "k"), LINEARS)
def test_a_token_has_the_same_bits_in_any_batch_and_team(
    library: Library, n: int, k: int, dtype: str
) -> None:
    case = Experts(n, k, dtype, 23, "any")
    together = case.run(library, threads=1)
    for threads in (2, 3):
        np.testing.assert_array_equal(bits(case.run(library, threads=threads)), bits(together))
    for rows in (slice(0, 1), slice(5, 6), slice(3, 12), slice(22, 23)):
        np.testing.assert_array_equal(bits(case.run(library, rows)), bits(together[rows]))
