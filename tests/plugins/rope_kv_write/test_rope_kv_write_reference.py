"""The torch references of rotary, kv_write and their fusion against float64 loops."""

from itertools import cycle, islice
from typing import Any

import numpy as np
import pytest
import torch
from kernel_harness import Step, make_step
from kv_slabs import KV_DTYPES, RECIPE_DTYPES, keep
from numpy.typing import NDArray

from llmbuild.plugins.common.kv_pools import LayerPools, bind_kv_pools, kept
from llmbuild.plugins.rope_kv_write.op import kv_write, rope_kv_write, rotary

EPS = 2.0**-24
SEQUENCES = [(0, 1), (7, 1), (0, 9), (3, 2), (15, 3)]
SHAPES = [(1, 1, 2, 1), (6, 2, 6, 4), (3, 3, 10, 5)]  # H, HKV, D, BS
Shape = tuple[int, int, int, int]


def angles_of(positions: NDArray[np.int32], turning: int) -> NDArray[np.float64]:
    return positions[:, None] * 100.0 ** (-np.arange(turning // 2) / turning)


def table_of(angles: NDArray[np.float64]) -> torch.Tensor:
    return torch.from_numpy(np.concatenate([np.cos(angles), np.sin(angles)], axis=1)).float()


def turned_by_loops(
    x: NDArray[np.float32], angles: NDArray[np.float64], head_dim: int
) -> NDArray[np.float64]:
    """Pairs (i, i + R/2) of the first R elements of every head as complex numbers, turned by the
    token's R/2 angles; the elements past R stay."""
    out = x.astype(np.float64)
    half = angles.shape[1]
    for token in range(x.shape[0]):
        for head in range(x.shape[1] // head_dim):
            for i in range(half):
                low, high = head * head_dim + i, head * head_dim + i + half
                number = complex(x[token, low], x[token, high]) * np.exp(1j * angles[token, i])
                out[token, low], out[token, high] = number.real, number.imag
    return out


def normed_by_loops(
    x: NDArray[np.float32], weight: NDArray[np.float32], eps: float
) -> NDArray[np.float64]:
    groups = x.astype(np.float64).reshape(x.shape[0], -1, len(weight))
    out = [[g / np.sqrt((g @ g) / len(g) + eps) * weight for g in row] for row in groups]
    return np.array(out).reshape(x.shape)


def make(shape: Shape, *dtypes: str) -> dict[str, Any]:
    """dtypes: of the heads in turn, over and over; fp32 where there are none."""
    heads, kv_heads, head_dim, block_size = shape
    rng = np.random.default_rng(head_dim)
    step, num_blocks = make_step(SEQUENCES, block_size, rng)
    tokens = len(step.positions)
    widths = {"q": heads * head_dim, "k": kv_heads * head_dim, "v": kv_heads * head_dim}
    case: dict[str, Any] = {
        name: rng.standard_normal((tokens, width)).astype(np.float32)
        for name, width in widths.items()
    }
    pool_shape = (num_blocks, kv_heads, block_size, head_dim)
    of_heads = [*islice(cycle(dtypes or ("fp32",)), kv_heads)]
    empty = [LayerPools.filled(pool_shape, of_heads, of_heads, torch.nan) for _ in range(3)]
    return case | {"step": step, "pools": empty, "angles": angles_of(step.positions, head_dim)}


def where(step: Step) -> list[torch.Tensor]:
    return [*map(torch.from_numpy, (step.positions, step.query_start, step.block_tables))]


def assert_pool_holds(pool: torch.Tensor, step: Step, rows: torch.Tensor) -> None:
    """Each token's row is in its slot, bit for bit, and every other slot is as it was."""
    block_size, head_dim = pool.shape[2:]
    expected = torch.full_like(pool, torch.nan)
    for token, (block, offset) in enumerate(step.slots(block_size)):
        expected[block, :, offset] = rows[token].unflatten(-1, (-1, head_dim)).to(pool.dtype)
    torch.testing.assert_close(pool, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("shape", SHAPES)
def test_rotary_turns_each_pair_of_every_head(shape: Shape) -> None:
    case = make(shape)
    for name in ("q", "k"):
        got = rotary(torch.from_numpy(case[name]), table_of(case["angles"]), shape[2])
        expected = turned_by_loops(case[name], case["angles"], shape[2])
        assert np.abs(got.numpy() - expected).max() <= 4 * EPS * 2 * np.abs(case[name]).max()


@pytest.mark.parametrize("turning", [2, 4, 8, 10])
def test_rotary_leaves_what_lies_past_the_tables_width(turning: int) -> None:
    case, head_dim = make(SHAPES[2]), SHAPES[2][2]
    angles = angles_of(case["step"].positions, turning)
    got = rotary(torch.from_numpy(case["q"]), table_of(angles), head_dim)
    expected = turned_by_loops(case["q"], angles, head_dim)
    assert np.abs(got.numpy() - expected).max() <= 4 * EPS * 2 * np.abs(case["q"]).max()
    heads = got.numpy().reshape(-1, head_dim), case["q"].reshape(-1, head_dim)
    np.testing.assert_array_equal(heads[0][:, turning:], heads[1][:, turning:])


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("shape", SHAPES)
def test_kv_write_fills_each_tokens_slot_of_its_layer_and_no_other(
    shape: Shape, dtype: str
) -> None:
    case = make(shape, dtype)
    k, v = torch.from_numpy(case["k"]), torch.from_numpy(case["v"])
    with bind_kv_pools(case["pools"]):
        written = kv_write(k, v, *where(case["step"]), layer=1)
    assert (written.shape, written.dtype) == ((1,), torch.int32)
    assert_pool_holds(case["pools"][1].k, case["step"], k)
    assert_pool_holds(case["pools"][1].v, case["step"], v)
    for layer in (0, 2):
        assert case["pools"][layer].k.isnan().all()
        assert case["pools"][layer].v.isnan().all()


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("kinds", [*([kind] for kind in KV_DTYPES), ["int4x2", "int8_t", "bf16"]])
@pytest.mark.parametrize("shape", SHAPES)
def test_kv_write_keeps_of_each_head_what_numpy_does(
    shape: Shape, kinds: list[str], scaled: bool
) -> None:
    """Once K and V are divided by channel scales, where there are any."""
    _, kv_heads, head_dim, block_size = shape
    case = make(shape, *(RECIPE_DTYPES[kind] for kind in kinds))
    case["k"][0] = 0
    scales = np.random.default_rng(2).uniform(0.02, 3, (2, kv_heads * head_dim)).astype(np.float32)
    given = [torch.from_numpy(each) if scaled else None for each in scales]
    with bind_kv_pools(case["pools"]):
        kv_write(*(torch.from_numpy(case[n]) for n in "kv"), *where(case["step"]), 1, *given)
    pools = case["pools"][1]
    for name, pool, scale in zip("kv", (pools.k, pools.v), scales, strict=True):
        rows = (case[name] / scale if scaled else case[name]).reshape(-1, kv_heads, head_dim)
        slots = case["step"].slots(block_size)
        for head, kind in zip(range(kv_heads), cycle(kinds)):
            expected = keep(kind, rows[:, head]).elements
            got = np.stack([pool[block, head, at].float().numpy() for block, at in slots])
            np.testing.assert_allclose(got, expected, rtol=2 * EPS, atol=2 * EPS)
        assert (~pool.isnan()).sum() == rows.size  # and no other slot


@pytest.mark.parametrize("dtype", ["int8", "int4"])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_row_of_codes_that_is_no_number_is_nan_and_no_other_row(dtype: str, bad: float) -> None:
    case = make(SHAPES[1], dtype)
    case["v"][3, 8] = bad  # of the second head
    with bind_kv_pools(case["pools"]):
        kv_write(*(torch.from_numpy(case[n]) for n in "kv"), *where(case["step"]), layer=1)
    slots = case["step"].slots(SHAPES[1][3])
    is_nan = np.stack([case["pools"][1].v[block, :, at].isnan().numpy() for block, at in slots])
    assert is_nan[3, 1].all()
    is_nan[3, 1] = False
    assert not is_nan.any()


@pytest.mark.parametrize("width", [2, 7, 64])
def test_an_int4_element_is_within_half_a_step_of_what_was_written(width: int) -> None:
    """And a bf16 rounding of the range's ends."""
    rng = np.random.default_rng(width)
    x = (rng.standard_normal((500, 1, width)) + rng.uniform(-3, 3, (500, 1, 1))).astype(np.float32)
    got = kept(torch.from_numpy(x), ["int4"]).numpy()
    ends = np.abs(x).max(-1, keepdims=True)
    span = np.ptp(x, axis=-1, keepdims=True)
    assert (np.abs(got - x) <= span / 30 * (1 + 2.0**-7) + 2.0**-8 * (ends + span)).all()


@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_fusion_norms_then_turns_and_writes_v_as_it_is(shape: Shape, normed: bool) -> None:
    case, head_dim, eps = make(shape), shape[2], 0.25
    weights = np.random.default_rng(1).standard_normal((2, head_dim)).astype(np.float32)
    q, k, v = (torch.from_numpy(case[name]) for name in ("q", "k", "v"))
    norms = [*map(torch.from_numpy, weights)] if normed else [None, None]
    table = table_of(case["angles"])
    with bind_kv_pools(case["pools"]):
        turned, _ = rope_kv_write(q, k, v, table, *norms, *where(case["step"]), layer=2, eps=eps)
    expected_q, expected_k = (
        turned_by_loops(
            normed_by_loops(case[name], weight, eps) if normed else case[name],
            *(case["angles"], head_dim),
        )
        for name, weight in zip(("q", "k"), weights, strict=True)
    )
    bound = 32 * EPS * max(np.abs(expected_q).max(), np.abs(expected_k).max())
    assert np.abs(turned.numpy() - expected_q).max() <= bound
    assert_pool_holds(case["pools"][2].v, case["step"], v)
    written = case["pools"][2].k
    for token, (block, offset) in enumerate(case["step"].slots(shape[3])):
        row = written[block, :, offset].flatten().numpy()
        assert np.abs(row - expected_k[token]).max() <= bound
    assert (~written.isnan()).sum() == case["k"].size


@pytest.mark.parametrize("normed", [False, True])
def test_without_a_table_nothing_turns_and_all_is_written(normed: bool) -> None:
    shape = SHAPES[1]
    case, head_dim, eps = make(shape), shape[2], 0.25
    weights = np.random.default_rng(1).standard_normal((2, head_dim)).astype(np.float32)
    q, k, v = (torch.from_numpy(case[name]) for name in ("q", "k", "v"))
    norms = [*map(torch.from_numpy, weights)] if normed else [None, None]
    with bind_kv_pools(case["pools"]):
        got, _ = rope_kv_write(q, k, v, None, *norms, *where(case["step"]), layer=0, eps=eps)
    expected_q, expected_k = (
        normed_by_loops(case[name], weight, eps) if normed else case[name]
        for name, weight in zip(("q", "k"), weights, strict=True)
    )
    bound = 32 * EPS * max(np.abs(expected_q).max(), np.abs(expected_k).max())
    assert np.abs(got.numpy() - expected_q).max() <= (bound if normed else 0)
    assert_pool_holds(case["pools"][0].v, case["step"], v)
    for token, (block, offset) in enumerate(case["step"].slots(shape[3])):
        row = case["pools"][0].k[block, :, offset].flatten().numpy()
        assert np.abs(row - expected_k[token]).max() <= (bound if normed else 0)
