from dataclasses import dataclass

import numpy as np
import pytest
from kernel_harness import EACH_LEVEL, KernelCompiler, Library, Step, bits, make_step
from kv_slabs import KV_DTYPES, MIXED, UNIFORM, Pool, keep

# (H, HKV, D, BS, QK-norm, rotated part of D): groups of 1, 2, 3, 4 and all heads.
SHAPES = [
    *((1, 1, 2, 1, 1, 2), (6, 2, 6, 4, 0, 6), (9, 3, 64, 16, 1, 64), (4, 1, 20, 16, 1, 20)),
    *((3, 3, 128, 7, 0, 128), (4, 2, 12, 6, 1, 8), (2, 1, 80, 16, 0, 32), (6, 3, 10, 4, 1, 0)),
]
Shape = tuple[int, int, int, int, int, int]
Kinds = tuple[str, str]  # of K's items and V's
CASES: list[tuple[Shape, Kinds]] = [(shape, kinds) for kinds in UNIFORM for shape in SHAPES]
CASES += [(SHAPES[index % len(SHAPES)], kinds) for index, kinds in enumerate(MIXED)]
EPS = 1e-6

# q, k and v are column slices of one buffer, as a merged projection leaves them. Workers run one
# after the other, so that each one's writes can be seen.
SOURCE = '#include "rope_kv_write/cpu.h"\n' + "".join(
    f"""
extern "C" void write_{k}_{v}_{d}(int id, int count, Step* step, const float* qkv,
                                  const float* table, const float* q_norm, const float* k_norm,
                                  float eps, {k}* k_pool, {v}* v_pool, float* q_out,
                                  const float* k_scale, const float* v_scale) {{
  constexpr int WIDTH = {(h + 2 * hkv) * d};
  rope_kv_write<{k}, {v}, {h}, {hkv}, {d}, {bs}, WIDTH, WIDTH, WIDTH, {h * d + 1}, bool({norm}),
                {rot}>(
      Worker{{id, count}}, *step, qkv, qkv + {h * d}, qkv + {(h + hkv) * d}, table, q_norm, k_norm,
      eps, k_pool, v_pool, q_out, k_scale, v_scale);
}}
"""
    for (h, hkv, d, bs, norm, rot), (k, v) in CASES
)

SEQUENCES = [(0, 5), (37, 1), (3, 13), (100, 2), (0, 1)]


@pytest.fixture(params=EACH_LEVEL)
def library(request: pytest.FixtureRequest, compiler: KernelCompiler) -> Library:
    return compiler.library(SOURCE, request.param)


@dataclass
class Written:
    q: np.ndarray
    k: Pool
    v: Pool


@dataclass
class Case:
    """Inputs of one step for a shape, and the pools' contents before it."""

    shape: Shape
    kinds: Kinds = ("float", "float")
    k_scale: np.ndarray | None = None
    v_scale: np.ndarray | None = None

    def __post_init__(self) -> None:
        h, hkv, d, bs, _, rot = self.shape
        rng = np.random.default_rng(d)
        self.step, self.num_blocks = make_step(SEQUENCES, bs, rng)
        tokens = len(self.step.positions)
        self.qkv = rng.standard_normal((tokens, (h + 2 * hkv) * d)).astype(np.float32)
        angle = self.step.positions[:, None] / 10000 ** (np.arange(rot // 2) / max(rot // 2, 1))
        self.table = np.concatenate([np.cos(angle), np.sin(angle)], axis=1).astype(np.float32)
        self.q_norm, self.k_norm = rng.uniform(0.5, 2, (2, d)).astype(np.float32)
        pool_shape = (self.num_blocks, hkv, bs, d)
        self.before = [Pool.unwritten(kind, pool_shape) for kind in self.kinds]

    @property
    def slots(self) -> list[tuple[int, int]]:
        return self.step.slots(self.shape[3])

    def raw_pools(self) -> list[np.ndarray]:
        """The bytes of K's pool and V's before the step."""
        return [p.encode(of) for p, of in zip(self.before, ("keys", "values"), strict=True)]

    def run(self, library: Library, workers: int = 1, tokens: slice | None = None) -> Written:
        """The whole step, or only `tokens` of it (all of one sequence) as a step of their own."""
        raw = self.raw_pools()
        q = np.concatenate(
            [self.run_worker(library, (id, workers), raw, tokens) for id in range(workers)]
        )
        q = q.reshape(workers, -1, *q.shape[1:])
        pools = (
            Pool.decode(pool.kind, written, of, pool.items.shape)
            for pool, written, of in zip(self.before, raw, ("keys", "values"), strict=True)
        )
        return Written(np.nanmax(q, axis=0), *pools)

    def run_worker(
        self,
        library: Library,
        worker: tuple[int, int],
        raw: list[np.ndarray],
        tokens: slice | None = None,
    ) -> np.ndarray:
        """One worker's share, into the bytes `raw` of the pools; its Q, the rest of it NaN."""
        h, _, d, _, _, _ = self.shape
        step, qkv, table = self.step, self.qkv, self.table
        if tokens is not None:
            s = int(np.searchsorted(step.query_start, tokens.start, side="right")) - 1
            start = np.array([0, tokens.stop - tokens.start], np.int32)
            lengths, tables = step.kv_lengths[s : s + 1].copy(), step.block_tables[s : s + 1].copy()
            step = Step(step.positions[tokens].copy(), start, lengths, tables)
            qkv, table = qkv[tokens].copy(), table[tokens].copy()
        q = np.full((len(qkv), h * d + 1), np.nan, np.float32)
        inputs = (qkv, table if table.size else None, self.q_norm, self.k_norm)
        name = f"write_{self.kinds[0]}_{self.kinds[1]}_{d}"
        library.call(name, *worker, step, *inputs, EPS, *raw, q, self.k_scale, self.v_scale)
        assert np.isnan(q[:, h * d :]).all()
        return q[:, : h * d].reshape(-1, h, d)

    def expected_heads(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """q and k rotated, and v, in float64: [T, heads, D]."""
        h, hkv, d, _, norm, rot = self.shape
        heads = self.qkv.astype(np.float64).reshape(len(self.qkv), -1, d)
        q, k, v = heads[:, :h], heads[:, h : h + hkv], heads[:, h + hkv :]
        if norm:
            q = q / np.sqrt((q**2).mean(-1, keepdims=True) + EPS) * self.q_norm
            k = k / np.sqrt((k**2).mean(-1, keepdims=True) + EPS) * self.k_norm
        table = self.table.astype(np.float64)[:, None]
        cosine, sine = np.tile(table[..., : rot // 2], 2), np.tile(table[..., rot // 2 :], 2)

        def rotate(x: np.ndarray) -> np.ndarray:
            turning = x[..., :rot]
            half = np.concatenate([-x[..., rot // 2 : rot], x[..., : rot // 2]], axis=-1)
            return np.concatenate([turning * cosine + half * sine, x[..., rot:]], axis=-1)

        return rotate(q), rotate(k), v


def assert_same(got: Pool, expected: Pool) -> None:
    """Bit for bit."""
    for name in ("items", "scales", "minima"):
        one, other = getattr(got, name), getattr(expected, name)
        np.testing.assert_array_equal(bits(one), bits(other), err_msg=name)


@pytest.mark.parametrize("shape", SHAPES)
def test_heads_are_normed_rotated_and_written_to_their_slots(
    library: Library, shape: Shape
) -> None:
    case = Case(shape)
    written = case.run(library, workers=2)
    q, k, v = case.expected_heads()
    bound = 24 * 2.0**-24 * 4  # roundings of norm and rotation, on values up to about 4
    np.testing.assert_allclose(written.q, q, rtol=0, atol=bound)
    np.testing.assert_allclose(written.k.get(case.slots).items, k, rtol=0, atol=bound)
    np.testing.assert_array_equal(written.v.get(case.slots).items, v.astype(np.float32))


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize(("shape", "kinds"), CASES)
def test_pools_keep_of_rows_what_numpy_does_and_change_no_other_slot(
    library: Library, shape: Shape, kinds: Kinds, scaled: bool
) -> None:
    """Of the rows of a float pool, divided by channel scales where there are any."""
    case, exact = Case(shape, kinds), Case(shape).run(library)
    _, hkv, d, _, _, _ = shape
    scales = np.random.default_rng(1).uniform(0.02, 3, (2, hkv * d)).astype(np.float32)
    case.k_scale, case.v_scale = scales if scaled else (None, None)
    written = case.run(library, workers=3)
    np.testing.assert_array_equal(bits(written.q), bits(exact.q))
    for got, before, rows, scale in zip(
        (written.k, written.v), case.before, (exact.k, exact.v), scales, strict=True
    ):
        values = rows.get(case.slots).items
        kept = keep(got.kind, values / scale.reshape(hkv, d) if scaled else values)
        for token, (block, offset) in enumerate(case.slots):
            row = Pool(got.kind, kept.items[token], kept.scales[token], kept.minima[token])
            before.put(block, offset, row)
        assert_same(got, before)


@pytest.mark.parametrize(("shape", "kinds"), CASES)
def test_a_token_is_written_with_the_same_bits_in_any_batch_and_team(
    library: Library, shape: Shape, kinds: Kinds
) -> None:
    case = Case(shape, kinds)
    together = case.run(library)
    for workers in (2, 3, 7):
        again = case.run(library, workers)
        np.testing.assert_array_equal(bits(again.q), bits(together.q))
        assert_same(again.k, together.k)
        assert_same(again.v, together.v)
    for token, slot in enumerate(case.slots):
        alone = case.run(library, 2, slice(token, token + 1))
        np.testing.assert_array_equal(bits(alone.q[0]), bits(together.q[token]))
        assert_same(alone.k.get([slot]), together.k.get([slot]))
        assert_same(alone.v.get([slot]), together.v.get([slot]))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", KV_DTYPES)
def test_no_byte_is_written_by_two_workers(library: Library, shape: Shape, kind: str) -> None:
    """Two tokens of int4 share bytes of V."""
    case = Case(shape, (kind, kind))
    for workers in (2, 3, len(case.qkv) * shape[1]):
        writers = [np.zeros(raw.shape, int) for raw in case.raw_pools()]
        for id in range(workers):
            raw = case.raw_pools()
            case.run_worker(library, (id, workers), raw)
            for count, after, before in zip(writers, raw, case.raw_pools(), strict=True):
                count += after != before
        assert [count.max() for count in writers] == [1, 1]


def test_an_empty_step_writes_nothing(library: Library) -> None:
    step, _ = make_step([], 4, np.random.default_rng(0))
    pool = np.ones((2, 2, 4, 6), np.float32)
    empty = np.zeros((0, 60), np.float32)
    arguments = (step, empty, empty, empty, empty, EPS, pool, pool, empty, None, None)
    library.call("write_float_float_6", 0, 2, *arguments)
    assert (pool == 1).all()


def test_elements_past_the_rotated_part_pass_unchanged(library: Library) -> None:
    case = Case((2, 1, 80, 16, 0, 32))
    heads = case.qkv.reshape(len(case.qkv), 4, 80)
    np.testing.assert_array_equal(bits(case.run(library, 2).q[..., 32:]), bits(heads[:, :2, 32:]))


def values_written(
    library: Library, kind: str, rows: list[list[float]]
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Codes, scales and minima of V where every token has these three heads of 10."""
    case = Case((6, 3, 10, 4, 1, 0), (kind, kind))  # nothing turns, and V is never normed
    case.qkv[:, -30:] = np.array(rows, np.float32).ravel()
    written = case.run(library, 2).v.get(case.slots)
    for part in (written.items, written.scales, written.minima):
        np.testing.assert_array_equal(part, np.broadcast_to(part[:1], part.shape))
    return written.items[0], written.scales[0], written.minima[0]


ZEROS, ONES = [0.0] * 10, [1.0] * 10


def test_int8_rows_of_zeros_have_scale_zero_and_ties_go_to_even(library: Library) -> None:
    ties = [127, 0.5, 1.5, -0.5, -2.5, 126.5, 3, -127, 0, 1]
    codes, scales, _ = values_written(library, "int8_t", [ZEROS, ties, ONES])
    np.testing.assert_array_equal(codes[:2], [ZEROS, [127, 0, 2, 0, -2, 126, 3, -127, 0, 1]])
    np.testing.assert_array_equal(scales[:2], [0, 1])


def test_static_int8_rounds_ties_to_even_and_stops_at_127(library: Library) -> None:
    row = [127.4, 128, 3e38, -3e38, 0.5, 1.5, -2.5, np.inf, -np.inf, np.nan]
    codes, _, _ = values_written(library, "int8_static", [row, ONES, ZEROS])
    np.testing.assert_array_equal(codes[0], [127, 127, 127, -127, 0, 2, -2, 127, -127, 0])


def test_int4_codes_span_the_row_and_ties_go_to_even(library: Library) -> None:
    row = [-8, 7, -7.5, -6.5, -5.5, 6.5, 0, 1, -1, -8]
    codes, scales, minima = values_written(library, "int4x2", [row, ONES, ZEROS])
    np.testing.assert_array_equal(codes[0], [0, 15, 0, 2, 2, 14, 8, 9, 7, 0])
    np.testing.assert_array_equal((scales[0], minima[0]), (1, -8))
    np.testing.assert_array_equal(codes[1:], [ZEROS] * 2)
    np.testing.assert_array_equal((scales[1:], minima[1:]), ([0, 0], [1, 0]))


def test_int4_scale_of_a_row_of_one_value_makes_up_for_a_minimum_rounded_down(
    library: Library,
) -> None:
    """Between the bf16 numbers 1 and 1 + 2^-7; a scale is never negative."""
    rows = [[1.003] * 10, [1.005] * 10, ZEROS]
    codes, scales, minima = values_written(library, "int4x2", rows)
    np.testing.assert_allclose(minima[0] + codes[0] * scales[0], 1.003, rtol=2.0**-16)
    np.testing.assert_array_equal(codes[1], ZEROS)
    np.testing.assert_array_equal((scales[1], minima[1]), (0, 1 + 2.0**-7))


def test_int4_rows_that_are_no_numbers_are_nan_as_a_whole(library: Library) -> None:
    """Of the last, the range isn't finite."""
    nan, infinite, wide = ([5.0, bad, *ONES[2:]] for bad in (np.nan, -np.inf, 3.3e38))
    wide[3] = -3.3e38
    codes, scales, minima = values_written(library, "int4x2", [nan, infinite, wide])
    assert (codes == 0).all()
    assert (scales == 0).all()
    assert np.isnan(minima).all()
