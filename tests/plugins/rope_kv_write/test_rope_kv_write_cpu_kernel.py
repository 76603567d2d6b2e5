from dataclasses import dataclass

import kv_slabs
import numpy as np
import pytest
from int8_rows import quantise
from kernel_harness import LEVELS, KernelCompiler, Library, Step, bits, make_step
from kv_slabs import KV_DTYPES

# (H, HKV, D, BS, QK-norm, rotated part of D): groups of 1, 2, 3, 4 and all heads.
SHAPES = [
    *((1, 1, 2, 1, 1, 2), (6, 2, 6, 4, 0, 6), (9, 3, 64, 16, 1, 64), (4, 1, 20, 16, 1, 20)),
    *((3, 3, 128, 7, 0, 128), (4, 2, 12, 6, 1, 8), (2, 1, 80, 16, 0, 32), (6, 3, 10, 4, 1, 0)),
]
Shape = tuple[int, int, int, int, int, int]
EPS = 1e-6

# q, k and v are column slices of one buffer, as a merged projection leaves them.
SOURCE = '#include "rope_kv_write/cpu.h"\n' + "".join(
    f"""
extern "C" void write_{kv}_{d}(int threads, Step* step, const float* qkv, const float* table,
                               const float* q_norm, const float* k_norm, float eps, {kv}* k_pool,
                               {kv}* v_pool, float* q_out) {{
  constexpr int WIDTH = {(h + 2 * hkv) * d};
  with_team(threads, [&](const Worker& worker) {{
    rope_kv_write<{kv}, {h}, {hkv}, {d}, {bs}, WIDTH, WIDTH, WIDTH, {h * d + 1}, bool({norm}),
                  {rot}>(
        worker, *step, qkv, qkv + {h * d}, qkv + {(h + hkv) * d}, table, q_norm, k_norm, eps,
        k_pool, v_pool, q_out);
  }});
}}
"""
    for kv in KV_DTYPES
    for h, hkv, d, bs, norm, rot in SHAPES
)

UNWRITTEN = {"float": np.nan, "bf16": np.nan, "int8_t": -128}  # a code that no write makes
POOLS = ("k_pool", "v_pool", "k_scale", "v_scale")
SEQUENCES = [(0, 5), (37, 1), (3, 13), (100, 2), (0, 1)]


@pytest.fixture(params=LEVELS)
def library(request: pytest.FixtureRequest, compiler: KernelCompiler) -> Library:
    return compiler.library(SOURCE, request.param)


@dataclass
class Written:
    """Q, and the pools as [blocks, HKV, BS, D] with, of int8, their scales [blocks, HKV, BS]."""

    q: np.ndarray
    k_pool: np.ndarray
    v_pool: np.ndarray
    k_scale: np.ndarray
    v_scale: np.ndarray


@dataclass
class Case:
    """Inputs of one step for a shape, and the pools' contents before it."""

    shape: Shape
    kv: str

    def __post_init__(self) -> None:
        h, hkv, d, bs, _, rot = self.shape
        rng = np.random.default_rng(d)
        self.step, self.num_blocks = make_step(SEQUENCES, bs, rng)
        tokens = len(self.step.positions)
        self.qkv = rng.standard_normal((tokens, (h + 2 * hkv) * d)).astype(np.float32)
        angle = self.step.positions[:, None] / 10000 ** (np.arange(rot // 2) / max(rot // 2, 1))
        self.table = np.concatenate([np.cos(angle), np.sin(angle)], axis=1).astype(np.float32)
        self.q_norm, self.k_norm = rng.uniform(0.5, 2, (2, d)).astype(np.float32)

    @property
    def slots(self) -> list[tuple[int, int]]:
        return self.step.slots(self.shape[3])

    def run(self, library: Library, threads: int, tokens: slice | None = None) -> Written:
        """The whole step, or only `tokens` of it (all of one sequence) as a step of their own."""
        h, hkv, d, bs, _, _ = self.shape
        step, qkv, table = self.step, self.qkv, self.table
        if tokens is not None:
            s = int(np.searchsorted(step.query_start, tokens.start, side="right")) - 1
            start = np.array([0, tokens.stop - tokens.start], np.int32)
            lengths, tables = step.kv_lengths[s : s + 1].copy(), step.block_tables[s : s + 1].copy()
            step = Step(step.positions[tokens].copy(), start, lengths, tables)
            qkv, table = qkv[tokens].copy(), table[tokens].copy()
        q = np.full((len(qkv), h * d + 1), 7.0, np.float32)
        dtype = KV_DTYPES[self.kv]
        empty = np.full((self.num_blocks, hkv, bs, d), UNWRITTEN[self.kv], dtype)
        scales = np.full(empty.shape[:3], np.nan, np.float32)
        pools = kv_slabs.encode(empty, empty, (scales, scales) if self.kv == "int8_t" else None)
        inputs = (qkv, table if table.size else None, self.q_norm, self.k_norm)
        library.call(f"write_{self.kv}_{d}", threads, step, *inputs, EPS, *pools, q)
        assert (q[:, h * d :] == 7.0).all()
        k_pool, v_pool, (k_scale, v_scale) = kv_slabs.decode(pools, dtype, bs, d)
        return Written(q[:, : h * d].reshape(-1, h, d), k_pool, v_pool, k_scale, v_scale)

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


@pytest.mark.parametrize("kv", ["float", "bf16"])
@pytest.mark.parametrize("shape", SHAPES)
def test_heads_are_normed_rotated_and_written_to_their_slots(
    library: Library, shape: Shape, kv: str
) -> None:
    case = Case(shape, kv)
    written = case.run(library, threads=2)
    q, k, v = case.expected_heads()
    bound = 24 * 2.0**-24 * 4  # roundings of norm and rotation, on values up to about 4
    np.testing.assert_allclose(written.q, q, rtol=0, atol=bound)
    rtol = 2.0**-8 if kv == "bf16" else 0  # half a bf16 ulp of the stored key
    for token, (block, offset) in enumerate(case.slots):
        stored = written.k_pool[block, :, offset].astype(np.float64)
        np.testing.assert_allclose(stored, k[token], rtol=rtol, atol=bound)
        values = v[token].astype(np.float32).astype(KV_DTYPES[kv])
        np.testing.assert_array_equal(bits(written.v_pool[block, :, offset]), bits(values))


@pytest.mark.parametrize("shape", SHAPES)
def test_int8_is_written_as_numpy_rounds_the_keys_of_a_float_pool(
    library: Library, shape: Shape
) -> None:
    exact, rounded = (Case(shape, kv).run(library, threads=2) for kv in ("float", "int8_t"))
    for name in ("k", "v"):
        heads, codes, scales = (
            np.stack([pool[block, :, offset] for block, offset in Case(shape, "float").slots])
            for pool in (
                getattr(exact, f"{name}_pool"),
                getattr(rounded, f"{name}_pool"),
                getattr(rounded, f"{name}_scale"),
            )
        )
        expected, expected_scales = quantise(heads.reshape(-1, shape[2]), shape[2])
        np.testing.assert_array_equal(codes.reshape(expected.shape), expected)
        np.testing.assert_array_equal(
            bits(scales.reshape(expected_scales.shape)), bits(expected_scales)
        )


@pytest.mark.parametrize("kv", KV_DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_only_the_slots_of_the_steps_tokens_change(library: Library, shape: Shape, kv: str) -> None:
    case = Case(shape, kv)
    written = case.run(library, threads=3)
    own = np.zeros(written.k_pool.shape, bool)
    for block, offset in case.slots:
        own[block, :, offset] = True
    for pool in (written.k_pool, written.v_pool):
        unwritten = pool == -128 if kv == "int8_t" else np.isnan(pool.astype(np.float32))
        np.testing.assert_array_equal(unwritten, ~own)
    if kv == "int8_t":
        for scales in (written.k_scale, written.v_scale):
            np.testing.assert_array_equal(np.isnan(scales), ~own[..., 0])


@pytest.mark.parametrize("kv", KV_DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_a_token_is_written_with_the_same_bits_in_any_batch_and_team(
    library: Library, shape: Shape, kv: str
) -> None:
    case = Case(shape, kv)
    together = case.run(library, threads=1)
    again = case.run(library, threads=3)
    for name in ("q", *POOLS):
        np.testing.assert_array_equal(bits(getattr(again, name)), bits(getattr(together, name)))
    for token, (block, offset) in enumerate(case.slots):
        alone = case.run(library, 2, slice(token, token + 1))
        np.testing.assert_array_equal(bits(alone.q[0]), bits(together.q[token]))
        for name in POOLS if kv == "int8_t" else POOLS[:2]:
            mine, theirs = getattr(alone, name), getattr(together, name)
            np.testing.assert_array_equal(
                bits(mine[block, :, offset]), bits(theirs[block, :, offset])
            )


def test_an_empty_step_writes_nothing(library: Library) -> None:
    step, _ = make_step([], 4, np.random.default_rng(0))
    pool = np.ones((2, 2, 4, 6), np.float32)
    empty = np.zeros((0, 60), np.float32)
    library.call("write_float_6", 2, step, empty, empty, empty, empty, EPS, pool, pool, empty)
    assert (pool == 1).all()


def test_elements_past_the_rotated_part_pass_unchanged(library: Library) -> None:
    case = Case((2, 1, 80, 16, 0, 32), "float")
    heads = case.qkv.reshape(len(case.qkv), 4, 80)
    np.testing.assert_array_equal(bits(case.run(library, 2).q[..., 32:]), bits(heads[:, :2, 32:]))


def test_int8_rows_of_zeros_have_scale_zero_and_ties_go_to_even(library: Library) -> None:
    case = Case((6, 3, 10, 4, 1, 0), "int8_t")  # nothing turns, and V is never normed
    values = case.qkv[:, -30:].reshape(-1, 3, 10)
    values[:, 0] = 0
    values[:, 1] = [127, 0.5, 1.5, -0.5, -2.5, 126.5, 3, -127, 0, 1]
    case.qkv[:, -30:] = values.reshape(-1, 30)
    written = case.run(library, 2)
    for block, offset in case.slots:
        np.testing.assert_array_equal(written.v_pool[block, 0, offset], 0)
        codes = [127, 0, 2, 0, -2, 126, 3, -127, 0, 1]
        np.testing.assert_array_equal(written.v_pool[block, 1, offset], codes)
        np.testing.assert_array_equal(written.v_scale[block, :2, offset], [0, 1])
