"""The torch reference of paged_attention against attention written out in float64."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kernel_harness import make_step
from numpy.typing import NDArray

from llmbuild.plugins.common.kv_pools import LayerPools, bind_kv_pools
from llmbuild.plugins.paged_attention.op import paged_attention

# (H, HKV, D, BS): groups of 1, 3, 4 and all heads.
SHAPES = [(1, 1, 2, 1), (6, 2, 6, 4), (8, 2, 3, 5), (5, 1, 14, 16), (3, 3, 7, 3)]
# (computed tokens, new tokens): whole prompts, chunks and decode of one step.
RAGGED = [(0, 1), (0, 5), (7, 1), (3, 9), (15, 1), (4, 4)]
WINDOWS = [0, 1, 4, 5, 1000]
EPS = 2.0**-24


def attention_by_loops(
    q: NDArray[np.float32],
    keys: NDArray[np.float64],
    values: NDArray[np.float64],
    positions: NDArray[np.int32],
    window: int,
    scale: float,
    soft_cap: float,
    sinks: NDArray[np.float32] | None,
) -> NDArray[np.float64]:
    """q [n, H, D] of one sequence's last n tokens; keys, values [length, HKV, D]. A sink is one
    more score, whose weight falls on no value."""
    out = np.zeros(q.shape)
    group = q.shape[1] // keys.shape[1]
    for row, position in enumerate(positions):
        seen = [p for p in range(position + 1) if not window or position - p < window]
        for head in range(q.shape[1]):
            scores = [float(q[row, head].astype(np.float64) @ keys[p, head // group]) for p in seen]
            scores = [scale * score for score in scores]
            if soft_cap:
                scores = [soft_cap * math.tanh(score / soft_cap) for score in scores]
            everything = scores if sinks is None else [*scores, float(sinks[head])]
            total = sum(math.exp(score - max(everything)) for score in everything)
            for p, score in zip(seen, scores, strict=True):
                weight = math.exp(score - max(everything)) / total
                out[row, head] += weight * values[p, head // group]
    return out


def check(
    shape: tuple[int, int, int, int],
    sequences: list[tuple[int, int]],
    window: int,
    soft_cap: float = 0.0,
    sinks: NDArray[np.float32] | None = None,
    has_channel_scales: bool = False,
) -> None:
    heads, kv_heads, head_dim, block_size = shape
    rng = np.random.default_rng(sum(shape) + window)
    step, num_blocks = make_step(sequences, block_size, rng)
    pool_shape = (num_blocks, kv_heads, block_size, head_dim)
    dtypes = ["fp32"] * kv_heads
    pools, elsewhere = (LayerPools.filled(pool_shape, dtypes, dtypes, torch.nan) for _ in range(2))
    factors = rng.uniform(0.5, 2, (2, kv_heads * head_dim)).astype(np.float32)
    factors = factors if has_channel_scales else np.ones_like(factors)
    whole: list[list[NDArray[np.float64]]] = []
    for s, length in enumerate(step.kv_lengths):
        whole.append([])
        for pool, scale in zip((pools.k, pools.v), factors, strict=True):
            rows = torch.from_numpy(rng.standard_normal((length, kv_heads, head_dim))).float()
            for p in range(length):
                block, offset = step.block_tables[s, p // block_size], p % block_size
                pool[block, :, offset] = rows[p]
            whole[-1].append(rows.double().numpy() * scale.reshape(kv_heads, head_dim))
    q = rng.standard_normal((len(step.positions), heads * head_dim)).astype(np.float32)
    scale = 1.7 * head_dim**-0.5
    arrays = (step.positions, step.query_start, step.kv_lengths, step.block_tables)
    scales = map(torch.from_numpy, factors) if has_channel_scales else (None, None)
    with bind_kv_pools([elsewhere, pools]):
        out = paged_attention(
            torch.from_numpy(q),
            torch.zeros(1, dtype=torch.int32),
            *map(torch.from_numpy, arrays),
            None if sinks is None else torch.from_numpy(sinks),
            layer=1,
            scale=scale,
            window=window,
            soft_cap=soft_cap,
            **dict(zip(("k_scale", "v_scale"), scales, strict=True)),
        )
    assert (out.shape, out.dtype) == (q.shape, torch.float32)
    for s, (keys, values) in enumerate(whole):
        rows = slice(step.query_start[s], step.query_start[s + 1])
        expected = attention_by_loops(
            q[rows].reshape(-1, heads, head_dim),
            *(keys, values, step.positions[rows], window, scale, soft_cap, sinks),
        )
        got = out[rows].numpy().reshape(expected.shape)
        largest = np.abs(values).max(initial=1.0)
        assert np.abs(got - expected).max(initial=0.0) <= 64 * (head_dim + 8) * EPS * largest


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("shape", SHAPES)
def test_ragged_step_with_shuffled_blocks_equals_loops(
    shape: tuple[int, int, int, int], window: int
) -> None:
    check(shape, RAGGED, window)


@pytest.mark.parametrize("shape", SHAPES)
def test_keys_and_values_are_what_is_kept_times_their_channel_scales(
    shape: tuple[int, int, int, int],
) -> None:
    check(shape, RAGGED, 5, has_channel_scales=True)


@pytest.mark.parametrize("soft_cap", [0.5, 3.0, 1e6])
@pytest.mark.parametrize("shape", SHAPES[:3])
def test_scores_are_capped_before_the_softmax(
    shape: tuple[int, int, int, int], soft_cap: float
) -> None:
    check(shape, RAGGED, 5, soft_cap=soft_cap)


@pytest.mark.parametrize("window", [0, 4])
@pytest.mark.parametrize("soft_cap", [0.0, 0.5])
@pytest.mark.parametrize("shape", SHAPES[:3])
def test_sink_of_each_head_takes_weight_from_the_values_and_is_not_capped(
    shape: tuple[int, int, int, int], soft_cap: float, window: int
) -> None:
    """From sinks that take nearly nothing to those that take nearly all."""
    sinks = np.linspace(-30, 6, shape[0]).astype(np.float32)
    check(shape, RAGGED, window, soft_cap=soft_cap, sinks=sinks)


@given(
    st.sampled_from(SHAPES),
    st.lists(st.tuples(st.integers(0, 17), st.integers(1, 7)), min_size=1, max_size=5),
    st.sampled_from(WINDOWS),
)
def test_any_mix_of_sequences_equals_loops(
    shape: tuple[int, int, int, int], sequences: list[tuple[int, int]], window: int
) -> None:
    check(shape, sequences, window)
