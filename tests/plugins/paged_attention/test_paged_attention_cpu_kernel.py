from dataclasses import dataclass

import kv_slabs
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_harness import LEVELS, KernelCompiler, Library, Step, bits, make_step
from kv_slabs import KV_DTYPES

# (H, HKV, D, BS): groups of 1, 2, 3, 4 and 5; blocks that 16 divides, that divide 16, and neither.
SHAPES = [
    (1, 1, 2, 1),
    (6, 2, 6, 4),
    (9, 3, 64, 16),
    (4, 1, 80, 24),
    (5, 1, 128, 32),
    (4, 2, 36, 7),
]
PAD_Q, PAD_OUT = 4, 3
RANGE_KEYS = 128  # kRangeKeys
SCRATCH_FLOATS = 1 << 16

# (shape, soft cap, sinks), among them the widest heads.
VARIANTS = [
    ((3, 3, 256, 16), True, False),
    ((6, 2, 6, 4), True, True),
    ((9, 3, 64, 16), False, True),
]

SOURCE = '#include "paged_attention/cpu.h"\n' + "".join(
    f"""
extern "C" void attend_{kv}_{d}(int threads, Step* step, const float* q, const {kv}* k_pool,
                                const {kv}* v_pool, float scale, int window, float* out,
                                float* scratch, int scratch_floats) {{
  with_team(threads, [&](const Worker& worker) {{
    paged_attention<{kv}, {h}, {hkv}, {d}, {bs}, {h * d + PAD_Q}, {h * d + PAD_OUT}>(
        worker, *step, q, k_pool, v_pool, scale, window, out, 0, nullptr, scratch, scratch_floats);
  }});
}}
"""
    for kv in KV_DTYPES
    for h, hkv, d, bs in SHAPES
)
VARIANTS_SOURCE = '#include "paged_attention/cpu.h"\n' + "".join(
    f"""
extern "C" void attend_{kv}_{d}{"_capped" * cap}{"_sinks" * sink}(
    int threads, Step* step, const float* q, const {kv}* k_pool, const {kv}* v_pool, float scale,
    int window, float* out, float* scratch, int scratch_floats, float soft_cap,
    const float* sinks) {{
  with_team(threads, [&](const Worker& worker) {{
    paged_attention<{kv}, {h}, {hkv}, {d}, {bs}, {h * d + PAD_Q}, {h * d + PAD_OUT}, bool({cap:d}),
                    bool({sink:d})>(worker, *step, q, k_pool, v_pool, scale, window, out, soft_cap,
                                    sinks, scratch, scratch_floats);
  }});
}}
"""
    for kv in KV_DTYPES
    for (h, hkv, d, bs), cap, sink in VARIANTS
)

Shape = tuple[int, int, int, int]


@pytest.fixture(scope="module", params=LEVELS)
def library(request: pytest.FixtureRequest, compiler: KernelCompiler) -> Library:
    return compiler.library(SOURCE, request.param)


@pytest.fixture(scope="module", params=LEVELS)
def variants(request: pytest.FixtureRequest, compiler: KernelCompiler) -> Library:
    return compiler.library(VARIANTS_SOURCE, request.param)


class Pool:
    """K or V, [blocks, HKV, BS, D]. Slots that nothing was written to hold NaN, or, of int8, any
    code and the scale NaN."""

    def __init__(self, shape: tuple[int, int, int, int], dtype: np.dtype) -> None:
        self.is_quantised = dtype == np.int8
        self.items = np.full(shape, -111 if self.is_quantised else np.nan, dtype)
        self.scales = np.full(shape[:3], np.nan, np.float32)

    def write(self, block: int, offset: int, items: np.ndarray, scales: np.ndarray) -> None:
        self.items[block, :, offset], self.scales[block, :, offset] = items, scales

    def without(self, slots: list[tuple[int, int]]) -> "Pool":
        """A copy in which nothing was written to these slots."""
        other = Pool(self.items.shape, self.items.dtype)
        other.items[:], other.scales[:] = self.items, self.scales
        for block, offset in slots:
            other.items[block, :, offset] = -111 if self.is_quantised else np.nan
            other.scales[block, :, offset] = np.nan
        return other


def encode(pools: tuple[Pool, Pool]) -> tuple[np.ndarray, np.ndarray]:
    k, v = pools
    return kv_slabs.encode(k.items, v.items, (k.scales, v.scales) if k.is_quantised else None)


@dataclass
class Case:
    """A step whose sequences' keys and values lie in the pools, and in nothing else of them."""

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
        dtype = KV_DTYPES[self.kv]
        self.pools = (Pool((num_blocks, hkv, bs, d), dtype), Pool((num_blocks, hkv, bs, d), dtype))
        # Of each sequence: items [length, HKV, D] and scales [length, HKV, 1].
        self.keys, self.values = [], []
        for s, length in enumerate(self.step.kv_lengths):
            for pool, rows in zip(self.pools, (self.keys, self.values), strict=True):
                items = rng.standard_normal((length, hkv, d))
                scales = np.ones((length, hkv, 1), np.float32)
                if pool.is_quantised:
                    items = np.clip(np.rint(50 * items), -127, 127)
                    scales = rng.uniform(0.001, 0.02, scales.shape).astype(np.float32)
                rows.append((items.astype(dtype), scales))
                for p in range(length):
                    block = self.step.block_tables[s, p // bs]
                    pool.write(block, p % bs, rows[-1][0][p], scales[p, :, 0])

    def run(self, library: Library, threads: int = 2, scratch: int = SCRATCH_FLOATS) -> np.ndarray:
        return self.attend(library, self.step, self.q, self.pools, threads, scratch)

    def run_chunk(self, library: Library, s: int, begin: int, end: int) -> np.ndarray:
        """Tokens [begin, end) of sequence s's new ones, alone and before later ones exist."""
        bs, step = self.shape[3], self.step
        first = int(step.query_start[s])
        positions = step.positions[first + begin : first + end].copy()
        length = int(positions[-1]) + 1
        later = range(length, int(step.kv_lengths[s]))
        slots = [(int(step.block_tables[s, p // bs]), p % bs) for p in later]
        pools = (self.pools[0].without(slots), self.pools[1].without(slots))
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
        pools: tuple[Pool, Pool],
        threads: int,
        scratch: int = SCRATCH_FLOATS,
    ) -> np.ndarray:
        width = q.shape[1]
        padded = np.full((len(q), width + PAD_Q), np.nan, np.float32)
        padded[:, :width] = q
        out = np.full((len(q), width + PAD_OUT), 7.0, np.float32)
        name = f"attend_{self.kv}_{self.shape[2]}"
        name += "_capped" * (self.soft_cap is not None) + "_sinks" * (self.sinks is not None)
        partials = np.full(scratch + 1, np.nan, np.float32)
        arguments = (threads, step, padded, *encode(pools), self.scale, self.window, out)
        extra = (self.soft_cap or 0.0, self.sinks)  # left alone by the kernels without either
        library.call(name, *arguments, partials, scratch, *extra)
        assert (out[:, width:] == 7.0).all()
        assert np.isnan(partials[-1])
        return out[:, :width]

    def check_against_float64(self, out: np.ndarray) -> None:
        h, hkv, d, _ = self.shape
        for s in range(len(self.sequences)):
            for t in range(self.step.query_start[s], self.step.query_start[s + 1]):
                position = int(self.step.positions[t])
                first = max(0, position - self.window + 1) if self.window else 0
                for head in range(h):
                    q = self.q[t, head * d : (head + 1) * d].astype(np.float64)
                    seen = (slice(first, position + 1), head // (h // hkv))
                    (keys, k_scales), (values, v_scales) = (
                        [part[seen].astype(np.float64) for part in rows[s]]
                        for rows in (self.keys, self.values)
                    )
                    expected, bound = self.expected(q, head, keys * k_scales, values, v_scales)
                    if self.kv == "int8_t":
                        bound += self.int8_bound(q, head, first, keys * k_scales, values, v_scales)
                    error = np.abs(out[t, head * d : (head + 1) * d] - expected)
                    assert (error <= bound).all()

    def weights(self, q: np.ndarray, head: int, k: np.ndarray) -> np.ndarray:
        scores = k @ q * self.scale
        if self.soft_cap is not None:
            scores = self.soft_cap * np.tanh(scores / self.soft_cap)
        sink = -np.inf if self.sinks is None else float(self.sinks[head])
        highest = max(scores.max(), sink)
        weights = np.exp(scores - highest)
        return weights / (weights.sum() + np.exp(sink - highest))

    def expected(
        self, q: np.ndarray, head: int, k: np.ndarray, values: np.ndarray, v_scales: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """One head's result, and how far fp32 arithmetic may be from it."""
        eps = 2.0**-24
        weights, v = self.weights(q, head, k), values * v_scales
        # A weight is off by the rounding of two scores, of exp, and of the sums.
        rounding = (q.size + 5) * eps * (np.abs(k) @ np.abs(q)).max() * self.scale
        rounding += 6 * eps * (self.soft_cap or 0)  # tanh, and two more
        return weights @ v, (2 * rounding + (len(k) + 15) * eps) * (weights @ np.abs(v))

    def int8_bound(
        self,
        q: np.ndarray,
        head: int,
        first: int,
        k: np.ndarray,
        values: np.ndarray,
        v_scales: np.ndarray,
    ) -> np.ndarray:
        """What rounding queries, and the weights of each range, to 15 bits of their largest adds:
        half a unit in each product."""
        unit = 0.501 / 32767
        weights = self.weights(q, head, k)
        score_error = unit * np.abs(q).max() * np.abs(k).sum(1).max() * self.scale
        bound = 2.1 * score_error * (weights @ np.abs(values * v_scales))
        scaled = weights[:, None] * v_scales
        ranges = (first + np.arange(len(k))) // RANGE_KEYS
        for each in np.unique(ranges):
            own = ranges == each
            bound += 1.01 * unit * scaled[own].max() * np.abs(values[own]).sum(0)
        return bound


@pytest.mark.parametrize("kv", KV_DTYPES)
@pytest.mark.parametrize("window", [0, 1, 17])
@pytest.mark.parametrize("shape", SHAPES)
def test_attention_is_within_the_rounding_bound_of_float64(
    library: Library, shape: Shape, window: int, kv: str
) -> None:
    case = Case(shape, kv, [(0, 1), (0, 17), (35, 1), (15, 3), (64, 2), (1, 40), (290, 1)], window)
    case.check_against_float64(case.run(library))


@settings(max_examples=15, deadline=None)
@given(
    shape=st.sampled_from(SHAPES),
    kv=st.sampled_from(list(KV_DTYPES)),
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


@pytest.mark.parametrize("kv", KV_DTYPES)
@pytest.mark.parametrize("window", [0, 7])
@pytest.mark.parametrize("shape", SHAPES)
def test_a_token_has_the_same_bits_in_any_chunk_batch_and_team(
    library: Library, shape: Shape, window: int, kv: str
) -> None:
    case = Case(shape, kv, [(20, 1), (115, 29), (0, 17)], window)
    together = case.run(library, threads=1)
    for threads in (2, 3):
        np.testing.assert_array_equal(bits(case.run(library, threads)), bits(together))
    for s, (_, new) in enumerate(case.sequences):
        first = int(case.step.query_start[s])
        for size in (1, 7, new):
            for begin in range(0, new, size):
                end = min(begin + size, new)
                chunk = case.run_chunk(library, s, begin, end)
                expected = together[first + begin : first + end]
                np.testing.assert_array_equal(bits(chunk), bits(expected))


@pytest.mark.parametrize("kv", KV_DTYPES)
def test_equal_keys_average_the_values_and_huge_scores_pick_one(library: Library, kv: str) -> None:
    case = Case((9, 3, 64, 16), kv, [(40, 1)])
    keys = case.pools[0]
    keys.items[np.isfinite(keys.items.astype(np.float32))] = 0
    items, scales = case.values[0]
    values = items.astype(np.float64) * scales
    got = case.run(library).reshape(9, 64)
    atol = 2e-5 if kv == "int8_t" else 1e-6  # a weight has 15 bits there
    np.testing.assert_allclose(got, values.mean(0).repeat(3, axis=0), atol=atol)
    case.q[:] = 1e6
    # Position 19 alone has a score above zero, 100 above and more.
    keys.items[case.step.block_tables[0, 1], :, 3] = 1
    chosen = values[19].astype(np.float32).repeat(3, axis=0)
    rtol = 3e-7 if kv == "int8_t" else 0
    np.testing.assert_allclose(case.run(library).reshape(9, 64), chosen, rtol=rtol)


# Contexts of several ranges, where few units are cut between threads.
LONG = [[(700, 1)], [(129, 1), (500, 3)], [(400, 1), (600, 1), (10, 1)]]


@pytest.mark.parametrize("kv", KV_DTYPES)
@pytest.mark.parametrize("window", [0, 150])
@pytest.mark.parametrize("shape", [SHAPES[1], SHAPES[2], SHAPES[3]])
def test_a_unit_that_threads_share_has_the_bits_of_one_that_they_do_not(
    library: Library, shape: Shape, window: int, kv: str
) -> None:
    for sequences in LONG:
        case = Case(shape, kv, sequences, window)
        alone = case.run(library, threads=1)
        for threads in (2, 3, 8):
            for scratch in (0, 1500, SCRATCH_FLOATS):
                shared = case.run(library, threads, scratch)
                np.testing.assert_array_equal(bits(shared), bits(alone))
        case.check_against_float64(alone)


def variant_case(variant: tuple[Shape, bool, bool], kv: str, window: int) -> Case:
    """Scores reach three and more: well into a soft cap of two, and around the sinks."""
    shape, capped, has_sinks = variant
    sinks = np.linspace(-3, 4, shape[0]).astype(np.float32) if has_sinks else None
    sequences = [(0, 1), (0, 17), (15, 3), (64, 2), (140, 1), (1, 40)]
    return Case(shape, kv, sequences, window, 0, 2.0 if capped else None, sinks)


@pytest.mark.parametrize("kv", KV_DTYPES)
@pytest.mark.parametrize("window", [0, 17])
@pytest.mark.parametrize("variant", VARIANTS)
def test_soft_cap_and_sinks_are_within_the_rounding_bound_of_float64(
    variants: Library, variant: tuple[Shape, bool, bool], window: int, kv: str
) -> None:
    case = variant_case(variant, kv, window)
    case.check_against_float64(case.run(variants))


@pytest.mark.parametrize("kv", KV_DTYPES)
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
