from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_harness import EACH_LEVEL, LEVELS, KernelCompiler, Library, Step, bits, make_step
from kv_slabs import BF16, KV_DTYPES, MIXED, UNIFORM, Pool

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

Shape = tuple[int, int, int, int]
Kinds = tuple[str, str]  # of K's items and V's
# Every shape in fp32; of other dtypes the third and some, and of mixtures those with fp32 and one
# that engines have: a compiler takes a second for each.
CASES: list[tuple[Shape, Kinds]] = [
    (shape, kinds)
    for index, kinds in enumerate(UNIFORM)
    for number, shape in enumerate(SHAPES)
    if index == 0 or number in (2, index + 1) or number % 3 == index % 3
]
CASES += [
    (SHAPES[1 + index % 5], kinds)
    for index, kinds in enumerate(MIXED)
    if "float" in kinds or kinds == ("int8_t", "int4x2")
]
VARIANT_CASES = [
    (variant, kv)
    for index, kv in enumerate(KV_DTYPES)
    for number, variant in enumerate(VARIANTS)
    if index == 0 or number == index % 3
]


def windowed(*windows: int, shapes: list[Shape] = SHAPES) -> list[tuple[Shape, Kinds, int]]:
    """The cases of some shapes with each window; where K and V differ with the last alone."""
    chosen = [(shape, kinds) for shape, kinds in CASES if shape in shapes]
    return [
        (*case, window)
        for case in chosen
        for window in windows
        if case[1] in UNIFORM or window == windows[-1]
    ]


CODES = KV_DTYPES.keys() - {"float", "bf16"}

SOURCE = '#include "paged_attention/cpu.h"\n' + "".join(
    f"""
extern "C" void attend_{k}_{v}_{d}(int threads, Step* step, const float* q, const {k}* k_pool,
                                   const {v}* v_pool, float scale, int window, float* out,
                                   float* scratch, int scratch_floats, const float* k_scale,
                                   const float* v_scale) {{
  with_team(threads, [&](const Worker& worker) {{
    paged_attention<{k}, {v}, {h}, {hkv}, {d}, {bs}, {h * d + PAD_Q}, {h * d + PAD_OUT}>(
        worker, *step, q, k_pool, v_pool, scale, window, out, 0, nullptr, scratch, scratch_floats,
        k_scale, v_scale);
  }});
}}
"""
    for (h, hkv, d, bs), (k, v) in CASES
)
VARIANTS_SOURCE = '#include "paged_attention/cpu.h"\n' + "".join(
    f"""
extern "C" void attend_{kv}_{kv}_{d}{"_capped" * cap}{"_sinks" * sink}(
    int threads, Step* step, const float* q, const {kv}* k_pool, const {kv}* v_pool, float scale,
    int window, float* out, float* scratch, int scratch_floats, const float* k_scale,
    const float* v_scale, float soft_cap, const float* sinks) {{
  with_team(threads, [&](const Worker& worker) {{
    paged_attention<{kv}, {kv}, {h}, {hkv}, {d}, {bs}, {h * d + PAD_Q}, {h * d + PAD_OUT},
                    bool({cap:d}), bool({sink:d})>(
        worker, *step, q, k_pool, v_pool, scale, window, out, soft_cap, sinks, scratch,
        scratch_floats, k_scale, v_scale);
  }});
}}
"""
    for ((h, hkv, d, bs), cap, sink), kv in VARIANT_CASES
)


@pytest.fixture(scope="module", params=EACH_LEVEL)
def library(request: pytest.FixtureRequest, compiler: KernelCompiler) -> Library:
    return compiler.library(SOURCE, request.param)


@pytest.fixture(scope="module", params=EACH_LEVEL)
def variants(request: pytest.FixtureRequest, compiler: KernelCompiler) -> Library:
    return compiler.library(VARIANTS_SOURCE, request.param)


@dataclass
class Case:
    """A step whose sequences' keys and values lie in the pools, and in nothing else of them."""

    shape: Shape
    kinds: Kinds
    sequences: list[tuple[int, int]]  # (computed tokens, new tokens)
    window: int = 0
    seed: int = 0
    soft_cap: float | None = None
    sinks: np.ndarray | None = None  # one logit a query head
    has_channel_scales: bool = False

    def __post_init__(self) -> None:
        h, hkv, d, bs = self.shape
        rng = np.random.default_rng(self.seed)
        self.scale = float(np.float32(1.7 / np.sqrt(d)))
        self.step, num_blocks = make_step(self.sequences, bs, rng)
        self.q = rng.standard_normal((len(self.step.positions), h * d)).astype(np.float32)
        self.pools = tuple(Pool.unwritten(kind, (num_blocks, hkv, bs, d)) for kind in self.kinds)
        # Of each sequence: rows [length, HKV, D] of K and of V.
        self.rows: list[tuple[Pool, Pool]] = []
        for s, length in enumerate(self.step.kv_lengths):
            self.rows.append(tuple(random_rows(kind, (length, hkv, d), rng) for kind in self.kinds))
            for pool, rows in zip(self.pools, self.rows[-1], strict=True):
                for p in range(length):
                    row = Pool(rows.kind, rows.items[p], rows.scales[p], rows.minima[p])
                    pool.put(self.step.block_tables[s, p // bs], p % bs, row)
        # Each element of K was divided by 0.5 to 2 times a scale that makes it about 1 again.
        self.factors = [
            rng.uniform(0.5, 2, (hkv, d)) / (40.0 if kind == "int8_static" else 1.0)
            for kind in self.kinds
        ]
        self.factors = [each.astype(np.float32) for each in self.factors]
        if not self.has_channel_scales:
            self.factors = [np.ones_like(each) for each in self.factors]
            # So that scores of static codes are of the size of others.
            self.q /= 40 if self.kinds[0] == "int8_static" else 1

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
        pools = tuple(without(pool, slots) for pool in self.pools)
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
        name = f"attend_{self.kinds[0]}_{self.kinds[1]}_{self.shape[2]}"
        name += "_capped" * (self.soft_cap is not None) + "_sinks" * (self.sinks is not None)
        partials = np.full(scratch + 1, np.nan, np.float32)
        raw = (pools[0].encode("keys"), pools[1].encode("values"))
        arguments = (threads, step, padded, *raw, self.scale, self.window, out, partials, scratch)
        scales = self.factors if self.has_channel_scales else (None, None)
        extra = (self.soft_cap or 0.0, self.sinks)  # left alone by the kernels without either
        library.call(name, *arguments, *scales, *extra)
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
                    kv_head = head // (h // hkv)
                    k, v = (seen_rows(rows, first, position, kv_head) for rows in self.rows[s])
                    k_factors, v_factors = (
                        each[kv_head].astype(np.float64) for each in self.factors
                    )
                    expected, bound = self.expected(q * k_factors, head, k, v)
                    bound += self.rounding_bound(q * k_factors, head, first, k, v)
                    error = np.abs(out[t, head * d : (head + 1) * d] - expected * v_factors)
                    assert (error <= (bound + 2.0**-23 * np.abs(expected)) * v_factors).all()

    def weights(self, q: np.ndarray, head: int, k: np.ndarray) -> np.ndarray:
        scores = k @ q * self.scale
        if self.soft_cap is not None:
            scores = self.soft_cap * np.tanh(scores / self.soft_cap)
        sink = -np.inf if self.sinks is None else float(self.sinks[head])
        highest = max(scores.max(), sink)
        weights = np.exp(scores - highest)
        return weights / (weights.sum() + np.exp(sink - highest))

    def expected(self, q: np.ndarray, head: int, k: Pool, v: Pool) -> tuple[np.ndarray, np.ndarray]:
        """One head's result, and how far fp32 arithmetic may be from it."""
        eps = 2.0**-24
        weights = self.weights(q, head, k.elements)
        # A weight is off by the rounding of two scores, of exp, and of the sums.
        rounding = (q.size + 7) * eps * (magnitudes(k) @ np.abs(q)).max() * self.scale
        rounding += 6 * eps * (self.soft_cap or 0)  # tanh, and two more
        bound = (2 * rounding + (len(k.items) + 15) * eps) * (weights @ magnitudes(v))
        return weights @ v.elements, bound

    def rounding_bound(self, q: np.ndarray, head: int, first: int, k: Pool, v: Pool) -> np.ndarray:
        """What rounding queries, where K are codes, and the weights of each range, where V are, to
        15 bits of their largest adds: half a unit in each product."""
        unit = 0.501 / 32767
        weights, bound = self.weights(q, head, k.elements), np.zeros(q.size)
        if k.kind in CODES:
            score_error = unit * np.abs(q).max() * np.abs(k.elements).sum(1).max() * self.scale
            bound += 2.1 * score_error * (weights @ magnitudes(v))
        if v.kind in CODES:
            scaled = weights * v.scales
            ranges = (first + np.arange(len(weights))) // RANGE_KEYS
            for each in np.unique(ranges):
                own = ranges == each
                codes = np.abs(v.items[own].astype(np.float64))
                bound += 1.01 * unit * scaled[own].max() * codes.sum(0)
        return bound


def random_rows(kind: str, shape: tuple[int, int, int], rng: np.random.Generator) -> Pool:
    """Rows [tokens, HKV, D] of elements of about 1, but for static codes."""
    items = rng.standard_normal(shape)
    scales, minima = np.ones(shape[:2], np.float32), np.zeros(shape[:2], np.float32)
    if kind in ("int8_t", "int8_static"):
        items = np.clip(np.rint(50 * items), -127, 127)
    if kind == "int8_t":
        scales = rng.uniform(0.001, 0.02, shape[:2]).astype(np.float32)
    if kind == "int4x2":
        items = rng.integers(0, 16, shape)
        scales, minima = (
            rng.uniform(*ends, shape[:2]).astype(BF16).astype(np.float32)
            for ends in ((0.01, 0.2), (-2, 0.5))
        )
    return Pool(kind, items.astype(KV_DTYPES[kind]), scales, minima)


def without(pool: Pool, slots: list[tuple[int, int]]) -> Pool:
    """A copy in which nothing was written to these slots."""
    other = Pool.unwritten(pool.kind, pool.items.shape)
    kept = np.ones((pool.items.shape[0], pool.items.shape[2]), bool)
    for block, offset in slots:
        kept[block, offset] = False
    for name in ("items", "scales", "minima"):
        getattr(other, name).swapaxes(1, 2)[kept] = getattr(pool, name).swapaxes(1, 2)[kept]
    return other


def seen_rows(rows: Pool, first: int, last: int, head: int) -> Pool:
    """One head's rows [keys, D] of positions first to last."""
    seen = (slice(first, last + 1), head)
    return Pool(rows.kind, rows.items[seen], rows.scales[seen], rows.minima[seen])


def magnitudes(rows: Pool) -> np.ndarray:
    """Of the parts that an element is the sum of."""
    codes = np.abs(rows.items.astype(np.float64)) * rows.scales[..., None]
    return codes + np.abs(rows.minima[..., None])


@pytest.mark.parametrize(("shape", "kinds", "window"), windowed(0, 1, 17))
def test_attention_is_within_the_rounding_bound_of_float64(
    library: Library, shape: Shape, kinds: Kinds, window: int
) -> None:
    sequences = [(0, 1), (0, 17), (35, 1), (15, 3), (64, 2), (1, 40), (290, 1)]
    case = Case(shape, kinds, sequences, window)
    case.check_against_float64(case.run(library))


@pytest.mark.parametrize(("shape", "kinds"), CASES)
def test_channel_scales_multiply_queries_and_results(
    library: Library, shape: Shape, kinds: Kinds
) -> None:
    sequences = [(0, 1), (35, 2), (15, 3), (290, 1)]
    case = Case(shape, kinds, sequences, window=33, has_channel_scales=True)
    out = case.run(library, threads=3)
    case.check_against_float64(out)
    np.testing.assert_array_equal(bits(case.run(library, threads=1)), bits(out))


@settings(max_examples=15, deadline=None)
@given(
    kind=st.sampled_from(CASES),
    sequences=st.lists(st.tuples(st.integers(0, 40), st.integers(1, 9)), max_size=4),
    window=st.sampled_from([0, 0, 1, 3, 16, 33]),
    seed=st.integers(0, 1000),
    threads=st.integers(1, 3),
)
def test_attention_of_any_ragged_batch_is_right(
    library: Library,
    kind: tuple[Shape, Kinds],
    sequences: list[tuple[int, int]],
    window: int,
    seed: int,
    threads: int,
) -> None:
    case = Case(*kind, sequences, window, seed)
    case.check_against_float64(case.run(library, threads))


@pytest.mark.parametrize(("shape", "kinds", "window"), windowed(0, 7))
def test_a_token_has_the_same_bits_in_any_chunk_batch_and_team(
    library: Library, shape: Shape, kinds: Kinds, window: int
) -> None:
    case = Case(shape, kinds, [(20, 1), (115, 29), (0, 17)], window)
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


@pytest.mark.parametrize("kinds", UNIFORM)
def test_equal_keys_average_the_values_and_huge_scores_pick_one(
    library: Library, kinds: Kinds
) -> None:
    case = Case((9, 3, 64, 16), kinds, [(40, 1)])
    keys = case.pools[0]
    keys.items[np.isfinite(keys.items.astype(np.float32))] = 0
    keys.minima[np.isfinite(keys.minima)] = 0
    values = case.rows[0][1].elements
    got = case.run(library).reshape(9, 64)
    # A weight has 15 bits where V are codes.
    atol = (2e-5 if kinds[1] in CODES else 1e-6) * max(np.abs(values).max() / 4, 1)
    np.testing.assert_allclose(got, values.mean(0).repeat(3, axis=0), rtol=1e-7, atol=atol)
    case.q[:] = 1e6
    # Position 19 alone has a score above zero, 100 above and more.
    keys.items[case.step.block_tables[0, 1], :, 3] = 1
    chosen = values[19].astype(np.float32).repeat(3, axis=0)
    rtol = 3e-7 if kinds[1] in CODES else 0
    atol = 1e-6 if kinds[1] == "int4x2" else 0  # a sum of two parts
    np.testing.assert_allclose(case.run(library).reshape(9, 64), chosen, rtol=rtol, atol=atol)


@pytest.mark.parametrize("kinds", [("int4x2", "float"), ("float", "int4x2")])
def test_an_int4_row_that_is_nan_makes_nan_of_the_tokens_that_see_it_alone(
    library: Library, kinds: Kinds
) -> None:
    shape = next(shape for shape, each in CASES if each == kinds)
    case = Case(shape, kinds, [(20, 4)], window=3)
    for pool in case.pools:
        block, offset = case.step.block_tables[0, 21 // shape[3]], 21 % shape[3]
        if pool.kind == "int4x2":
            pool.minima[block, 0, offset] = np.nan  # position 21, one KV head
    group = shape[0] // shape[1]
    is_nan = np.isnan(case.run(library)).reshape(4, shape[0], shape[2])
    assert is_nan[1:4, :group].all()
    assert not is_nan[0].any()
    assert not is_nan[:, group:].any()


# Contexts of several ranges, where few units are cut between threads.
LONG = [[(700, 1)], [(129, 1), (500, 3)], [(400, 1), (600, 1), (10, 1)]]


@pytest.mark.parametrize(("shape", "kinds", "window"), windowed(150, 0, shapes=SHAPES[1:4]))
def test_a_unit_that_threads_share_has_the_bits_of_one_that_they_do_not(
    library: Library, shape: Shape, kinds: Kinds, window: int
) -> None:
    for sequences in LONG:
        case = Case(shape, kinds, sequences, window)
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
    return Case(shape, (kv, kv), sequences, window, 0, 2.0 if capped else None, sinks)


@pytest.mark.parametrize("window", [0, 17])
@pytest.mark.parametrize(("variant", "kv"), VARIANT_CASES)
def test_soft_cap_and_sinks_are_within_the_rounding_bound_of_float64(
    variants: Library, variant: tuple[Shape, bool, bool], window: int, kv: str
) -> None:
    case = variant_case(variant, kv, window)
    case.check_against_float64(case.run(variants))


@pytest.mark.parametrize(("variant", "kv"), VARIANT_CASES)
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
        compiler.library(source, LEVELS[0]) for source in (SOURCE, VARIANTS_SOURCE)
    )
    case = Case((9, 3, 64, 16), ("float", "float"), [(40, 2)])
    plain = case.run(library)
    case.sinks = np.full(9, -np.inf, np.float32)
    np.testing.assert_array_equal(bits(case.run(variants)), bits(plain))
    case.sinks = np.full(9, 300, np.float32)
    np.testing.assert_array_equal(case.run(variants), 0)
