from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_harness import DTYPES, LEVELS, KernelCompiler, Library, Step, bits, make_step

# (H, HKV, D, BS): groups of 1, 3, 4 and all heads.
SHAPES = [(1, 1, 2, 1), (6, 2, 6, 4), (9, 3, 64, 16), (4, 1, 20, 16), (5, 1, 128, 4), (3, 3, 36, 1)]
PAD_Q, PAD_OUT = 4, 3

# (shape, soft cap, sinks), among them the widest heads.
VARIANTS = [
    ((4, 2, 256, 16), False, False),
    ((4, 2, 256, 16), True, False),
    ((6, 2, 6, 4), True, True),
    ((9, 3, 64, 16), False, True),
]

SOURCE = '#include "paged_attention/cpu.h"\n' + "".join(
    f"""
extern "C" void attend_{kv}_{d}(int threads, Step* step, const float* q, const {kv}* k_pool,
                                const {kv}* v_pool, float scale, int window, float* out) {{
  with_team(threads, [&](const Worker& worker) {{
    paged_attention<{kv}, {h}, {hkv}, {d}, {bs}, {h * d + PAD_Q}, {h * d + PAD_OUT}>(
        worker, *step, q, k_pool, v_pool, scale, window, out);
  }});
}}
"""
    for kv in DTYPES
    for h, hkv, d, bs in SHAPES
)
VARIANTS_SOURCE = '#include "paged_attention/cpu.h"\n' + "".join(
    f"""
extern "C" void attend_{kv}_{d}{"_capped" * cap}{"_sinks" * sink}(
    int threads, Step* step, const float* q, const {kv}* k_pool, const {kv}* v_pool, float scale,
    int window, float* out, float soft_cap, const float* sinks) {{
  with_team(threads, [&](const Worker& worker) {{
    paged_attention<{kv}, {h}, {hkv}, {d}, {bs}, {h * d + PAD_Q}, {h * d + PAD_OUT}, bool({cap:d}),
                    bool({sink:d})>(worker, *step, q, k_pool, v_pool, scale, window, out, soft_cap,
                                    sinks);
  }});
}}
"""
    for kv in DTYPES
    for (h, hkv, d, bs), cap, sink in VARIANTS
)

Shape = tuple[int, int, int, int]


@pytest.fixture(scope="module", params=LEVELS)
def library(request: pytest.FixtureRequest, compiler: KernelCompiler) -> Library:
    return compiler.library(SOURCE, request.param)


@pytest.fixture(scope="module", params=LEVELS)
def variants(request: pytest.FixtureRequest, compiler: KernelCompiler) -> Library:
    return compiler.library(VARIANTS_SOURCE, request.param)


@dataclass
class Case:
    """A step whose sequences' keys and values lie in the pools; every other slot is NaN."""

    shape: Shape
    kv: str
    sequences: list[tuple[int, int]]  # (computed tokens, new tokens)
    window: int = 0
    seed: int = 0
    soft_cap: float | None = None
    sinks: np.ndarray | None = None  # one logit a query head

    def __post_init__(self) -> None:
        h, hkv, d, bs = self.shape
        rng = np.random.default_rng(self.seed)
        self.scale = float(np.float32(1.7 / np.sqrt(d)))
        self.step, num_blocks = make_step(self.sequences, bs, rng)
        self.q = rng.standard_normal((len(self.step.positions), h * d)).astype(np.float32)
        self.keys, self.values = [], []
        pool_shape = (num_blocks, hkv, bs, d)
        self.k_pool, self.v_pool = (np.full(pool_shape, np.nan, DTYPES[self.kv]) for _ in "kv")
        for s, length in enumerate(self.step.kv_lengths):
            for pool, rows in ((self.k_pool, self.keys), (self.v_pool, self.values)):
                rows.append(rng.standard_normal((length, hkv, d)).astype(DTYPES[self.kv]))
                for p in range(length):
                    pool[self.step.block_tables[s, p // bs], :, p % bs] = rows[-1][p]

    def run(self, library: Library, threads: int = 2) -> np.ndarray:
        return self.attend(library, self.step, self.q, (self.k_pool, self.v_pool), threads)

    def run_chunk(self, library: Library, s: int, begin: int, end: int) -> np.ndarray:
        """Tokens [begin, end) of sequence s's new ones, alone and before later ones exist."""
        bs, step = self.shape[3], self.step
        first = int(step.query_start[s])
        positions = step.positions[first + begin : first + end].copy()
        length = int(positions[-1]) + 1
        pools = (self.k_pool.copy(), self.v_pool.copy())
        for p in range(length, int(step.kv_lengths[s])):
            for pool in pools:
                pool[step.block_tables[s, p // bs], :, p % bs] = np.nan
        chunk = Step(
            positions,
            np.array([0, end - begin], np.int32),
            np.array([length], np.int32),
            step.block_tables[s : s + 1].copy(),
        )
        return self.attend(library, chunk, self.q[first + begin : first + end], pools, 2)

    def attend(
        self,
        library: Library,
        step: Step,
        q: np.ndarray,
        pools: tuple[np.ndarray, np.ndarray],
        threads: int,
    ) -> np.ndarray:
        width = q.shape[1]
        padded = np.full((len(q), width + PAD_Q), np.nan, np.float32)
        padded[:, :width] = q
        out = np.full((len(q), width + PAD_OUT), 7.0, np.float32)
        name = f"attend_{self.kv}_{self.shape[2]}"
        name += "_capped" * (self.soft_cap is not None) + "_sinks" * (self.sinks is not None)
        extra = (self.soft_cap or 0.0, self.sinks)  # left alone by the kernels without either
        library.call(name, threads, step, padded, *pools, self.scale, self.window, out, *extra)
        assert (out[:, width:] == 7.0).all()
        return out[:, :width]

    def check_against_float64(self, out: np.ndarray) -> None:
        h, hkv, d, _ = self.shape
        eps = 2.0**-24
        for s in range(len(self.sequences)):
            keys, values = self.keys[s].astype(np.float64), self.values[s].astype(np.float64)
            for t in range(self.step.query_start[s], self.step.query_start[s + 1]):
                position = int(self.step.positions[t])
                first = max(0, position - self.window + 1) if self.window else 0
                for head in range(h):
                    q = self.q[t, head * d : (head + 1) * d].astype(np.float64)
                    k = keys[first : position + 1, head // (h // hkv)]
                    v = values[first : position + 1, head // (h // hkv)]
                    scores = k @ q * self.scale
                    if self.soft_cap is not None:
                        scores = self.soft_cap * np.tanh(scores / self.soft_cap)
                    sink = -np.inf if self.sinks is None else float(self.sinks[head])
                    highest = max(scores.max(), sink)
                    weights = np.exp(scores - highest)
                    weights /= weights.sum() + np.exp(sink - highest)
                    # A weight is off by the rounding of two scores, of exp, and of the sums.
                    rounding = (d + 3) * eps * (np.abs(k) @ np.abs(q)).max() * self.scale
                    rounding += 6 * eps * (self.soft_cap or 0)  # tanh, and two more
                    bound = (2 * rounding + (len(k) + 12) * eps) * (weights @ np.abs(v))
                    error = np.abs(out[t, head * d : (head + 1) * d] - weights @ v)
                    assert (error <= bound).all()


@pytest.mark.parametrize("kv", DTYPES)
@pytest.mark.parametrize("window", [0, 1, 5, 16, 17])
@pytest.mark.parametrize("shape", SHAPES)
def test_attention_is_within_the_rounding_bound_of_float64(
    library: Library, shape: Shape, window: int, kv: str
) -> None:
    case = Case(shape, kv, [(0, 1), (0, 17), (35, 1), (15, 3), (64, 2), (1, 40)], window)
    case.check_against_float64(case.run(library))


@settings(max_examples=25, deadline=None)
@given(
    shape=st.sampled_from(SHAPES),
    kv=st.sampled_from(list(DTYPES)),
    sequences=st.lists(st.tuples(st.integers(0, 40), st.integers(1, 9)), max_size=4),
    window=st.sampled_from([0, 0, 1, 3, 16, 33]),
    seed=st.integers(0, 1000),
    threads=st.integers(1, 3),
)
def test_attention_of_any_ragged_batch_is_right(
    library: Library,
    shape: Shape,
    kv: str,
    sequences: list[tuple[int, int]],
    window: int,
    seed: int,
    threads: int,
) -> None:
    case = Case(shape, kv, sequences, window, seed)
    case.check_against_float64(case.run(library, threads))


@pytest.mark.parametrize("kv", DTYPES)
@pytest.mark.parametrize("window", [0, 7])
@pytest.mark.parametrize("shape", SHAPES)
def test_a_token_has_the_same_bits_in_any_chunk_batch_and_team(
    library: Library, shape: Shape, window: int, kv: str
) -> None:
    case = Case(shape, kv, [(20, 1), (5, 45), (0, 33), (80, 1)], window)
    together = case.run(library, threads=1)
    for threads in (2, 3):
        np.testing.assert_array_equal(bits(case.run(library, threads)), bits(together))
    for s, (_, new) in enumerate(case.sequences):
        first = int(case.step.query_start[s])
        for size in (1, 7, 16, new):
            for begin in range(0, new, size):
                end = min(begin + size, new)
                chunk = case.run_chunk(library, s, begin, end)
                expected = together[first + begin : first + end]
                np.testing.assert_array_equal(bits(chunk), bits(expected))


@pytest.mark.parametrize("kv", DTYPES)
def test_equal_keys_average_the_values_and_huge_scores_pick_one(library: Library, kv: str) -> None:
    case = Case((9, 3, 64, 16), kv, [(40, 1)])
    case.k_pool[np.isfinite(case.k_pool.astype(np.float32))] = 0
    mean = case.values[0].astype(np.float64).mean(0).repeat(3, axis=0)
    np.testing.assert_allclose(case.run(library).reshape(9, 64), mean, atol=1e-6)
    block = case.step.block_tables[0, 1]
    case.q[:] = 1000
    case.k_pool[block, :, 3] = 1  # position 19 alone has a score above zero, 100 above and more
    chosen = case.values[0][19].astype(np.float32).repeat(3, axis=0)
    np.testing.assert_array_equal(case.run(library).reshape(9, 64), chosen)


def variant_case(variant: tuple[Shape, bool, bool], kv: str, window: int) -> Case:
    """Scores reach three and more: well into a soft cap of two, and around the sinks."""
    shape, capped, has_sinks = variant
    sinks = np.linspace(-3, 4, shape[0]).astype(np.float32) if has_sinks else None
    sequences = [(0, 1), (0, 17), (35, 1), (15, 3), (64, 2), (1, 40)]
    return Case(shape, kv, sequences, window, 0, 2.0 if capped else None, sinks)


@pytest.mark.parametrize("kv", DTYPES)
@pytest.mark.parametrize("window", [0, 5, 17])
@pytest.mark.parametrize("variant", VARIANTS)
def test_soft_cap_and_sinks_are_within_the_rounding_bound_of_float64(
    variants: Library, variant: tuple[Shape, bool, bool], window: int, kv: str
) -> None:
    case = variant_case(variant, kv, window)
    case.check_against_float64(case.run(variants))


@pytest.mark.parametrize("kv", DTYPES)
@pytest.mark.parametrize("variant", VARIANTS)
def test_soft_cap_and_sinks_have_the_same_bits_in_any_chunk_and_team(
    variants: Library, variant: tuple[Shape, bool, bool], kv: str
) -> None:
    case = variant_case(variant, kv, 7)
    together = case.run(variants, threads=1)
    np.testing.assert_array_equal(bits(case.run(variants, threads=3)), bits(together))
    s, first = 5, int(case.step.query_start[5])
    for begin, end in ((0, 1), (1, 8), (8, 24), (24, 40), (0, 40)):
        chunk = case.run_chunk(variants, s, begin, end)
        np.testing.assert_array_equal(bits(chunk), bits(together[first + begin : first + end]))


def test_a_sink_far_below_changes_nothing_and_one_far_above_takes_everything(
    compiler: KernelCompiler,
) -> None:
    library, variants = (
        compiler.library(source, LEVELS[-1]) for source in (SOURCE, VARIANTS_SOURCE)
    )
    case = Case((9, 3, 64, 16), "float", [(40, 2)])
    plain = case.run(library)
    case.sinks = np.full(9, -np.inf, np.float32)
    np.testing.assert_array_equal(bits(case.run(variants)), bits(plain))
    case.sinks = np.full(9, 300, np.float32)
    np.testing.assert_array_equal(case.run(variants), 0)
