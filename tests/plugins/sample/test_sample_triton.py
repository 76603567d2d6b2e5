"""The GPU kernels of sampling, in Triton's interpreter, against runtime/sampling.py's rules with
everything sorted and summed in float64."""

from dataclasses import dataclass, replace

import numpy as np
import pytest
from numpy.typing import NDArray
from triton_harness import launch, triton

from llmbuild.plugins.sample.draw_triton import kept_tokens, ranks_of
from llmbuild.plugins.sample.triton import best_of_parts, greedy, sample

tl = triton.language

Logits = NDArray[np.float32]
SIZES = [1, 2, 15, 16, 17, 100]


@dataclass(frozen=True)
class Params:
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0


def best_of(logits: Logits, columns: int) -> NDArray[np.int64]:
    rows, size = logits.shape
    best = np.zeros((rows, -(-size // columns)), np.int64)
    launch(best_of_parts, best.shape, logits=logits, V=size, best=best, COLUMNS=columns)
    return best


def run_greedy(logits: Logits, columns: int = 16) -> list[int]:
    best, tokens = best_of(logits, columns), np.full(len(logits), -99, np.int32)
    launch(greedy, (len(logits),), best=best, parts=best.shape[1], tokens=tokens, PARTS=4)
    return tokens.tolist()


def run_sample(
    logits: Logits,
    params: Params | list[Params],
    seeds: NDArray[np.int64] | None = None,
    counters: NDArray[np.int32] | None = None,
    columns: int = 32,
) -> NDArray[np.int32]:
    rows, size = logits.shape
    each = params if isinstance(params, list) else [params] * rows
    best, tokens = best_of(logits, 16), np.full(rows, -99, np.int32)
    launch(
        sample,
        (rows,),
        logits=logits,
        best=best,
        temperatures=np.array([p.temperature for p in each], np.float32),
        top_ks=np.array([p.top_k for p in each], np.int32),
        top_ps=np.array([p.top_p for p in each], np.float32),
        min_ps=np.array([p.min_p for p in each], np.float32),
        seeds=np.arange(rows) if seeds is None else seeds,
        counters=np.zeros(rows, np.int32) if counters is None else counters,
        V=size,
        parts=best.shape[1],
        tokens=tokens,
        PARTS=4,
        COLUMNS=columns,
    )
    return tokens


def weights_left(logits: Logits, params: Params) -> NDArray[np.float64]:
    """Of a row, 0 for what isn't kept."""
    shifted = logits.astype(np.float64) - logits.max()
    weights = np.exp(shifted / np.float32(params.temperature))
    if 0 < params.top_k < len(weights):
        weights[shifted < np.sort(shifted)[-params.top_k]] = 0.0
    if params.top_p < 1:
        order = np.argsort(-weights, kind="stable")
        before = np.cumsum(weights[order]) - weights[order]
        kept = before < np.float32(params.top_p) * weights.sum()
        kept[0] = True
        weights[order[~kept]] = 0.0
    weights[weights < np.float32(params.min_p)] = 0.0
    return weights


@pytest.mark.parametrize("columns", [16, 64])
@pytest.mark.parametrize("size", SIZES)
def test_greedy_takes_the_first_of_the_likeliest(size: int, columns: int) -> None:
    rng = np.random.default_rng(size)
    logits = np.round(rng.standard_normal((5, size)) * 2).astype(np.float32)
    assert run_greedy(logits, columns) == logits.argmax(1).tolist()


def test_greedy_knows_zeros_and_infinities() -> None:
    inf, nan = np.inf, np.nan
    logits = np.full((8, 20), -5.0, np.float32)
    logits[0, [3, 18]] = -0.0, 0.0  # the same number
    logits[1, [3, 18]] = 1e-45, 3e-45
    logits[2] = -inf
    logits[2, 17] = np.finfo(np.float32).min
    logits[3] = -inf
    logits[4, [2, 19]] = inf
    logits[5, [1, 4, 18]] = inf, nan, -nan
    logits[6, [0, 18]] = np.finfo(np.float32).max, nan
    logits[7, [2, 3]] = -1.0, -2.0
    assert run_greedy(logits) == [3, 18, 17, ~0, ~2, ~4, ~18, 2]


@triton.jit
def kept_kernel(
    logits,
    best,
    temperature,
    top_k,
    top_p,
    V,
    last,
    end,
    COLUMNS: tl.constexpr,
):
    last_rank, last_end = kept_tokens(
        logits,
        V,
        ranks_of(tl.load(best)),
        tl.load(temperature),
        tl.load(top_k),
        tl.load(top_p),
        COLUMNS,
    )
    tl.store(last, last_rank)
    tl.store(end, last_end)


def kept(logits: Logits, params: Params) -> list[int]:
    """Which tokens the kernels keep by top-k and top-p."""
    last, end = np.zeros(1, np.int32), np.zeros(1, np.int32)
    launch(
        kept_kernel,
        (1,),
        logits=logits,
        best=np.array([logits.max()]),
        temperature=np.array([params.temperature], np.float32),
        top_k=np.array([params.top_k], np.int32),
        top_p=np.array([params.top_p], np.float32),
        V=len(logits),
        last=last,
        end=end,
        COLUMNS=32,
    )
    bits = (logits + np.float32(0)).view(np.int32)
    ranks = np.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    tokens = np.arange(len(logits))
    return tokens[(ranks > last) | ((ranks == last) & (tokens < end))].tolist()


@pytest.mark.parametrize("spread", [0.0, 1.0, 9.0])
@pytest.mark.parametrize(
    "params",
    [
        Params(top_k=1),
        Params(top_k=9),
        Params(top_k=99),
        Params(top_p=0.3),
        Params(top_p=0.97),
        Params(top_p=1e-30),
        Params(top_k=40, top_p=0.6),
        Params(top_k=12, top_p=0.5, temperature=0.3),
        Params(top_p=0.8, temperature=5.0),
    ],
    ids=str,
)
@pytest.mark.parametrize("size", [1, 17, 100])
def test_kept_tokens_are_those_of_a_sorted_vocabulary(
    size: int, params: Params, spread: float
) -> None:
    """Also where many tie: logits in steps of 1/4."""
    rng = np.random.default_rng(size)
    logits = (np.round(4 * spread * rng.standard_normal(size)) / 4).astype(np.float32)
    assert kept(logits, params) == np.flatnonzero(weights_left(logits, params)).tolist()


def test_top_p_reached_exactly_keeps_no_further_token() -> None:
    halves = np.log(np.array([0.125, 0.5, 0.125, 0.25], np.float32))
    assert kept(np.zeros(4, np.float32), Params(top_p=0.5)) == [0, 1]
    assert kept(halves, Params(top_p=0.5)) == [1]
    assert kept(halves, Params(top_p=0.51)) == [1, 3]
    tokens = run_sample(np.zeros((12, 4), np.float32), Params(top_p=0.5), columns=8)
    assert set(tokens.tolist()) == {0, 1}


@triton.jit
def random_kernel(seeds, counters, bits):
    row = tl.program_id(0)
    high, low, _, _ = tl.randint4x(tl.load(seeds + row), tl.load(counters + row))
    tl.store(bits + 2 * row, high.to(tl.int32, bitcast=True))
    tl.store(bits + 2 * row + 1, low.to(tl.int32, bitcast=True))


def uniforms(seeds: NDArray[np.int64], counters: NDArray[np.int32]) -> NDArray[np.float64]:
    bits = np.zeros((len(seeds), 2), np.int32)
    launch(random_kernel, (len(seeds),), seeds=seeds, counters=counters, bits=bits)
    words = bits.view(np.uint32).astype(np.float64)
    return (words[:, 0] + words[:, 1] * 2.0**-32) * 2.0**-32


@pytest.mark.parametrize(
    "params",
    [
        Params(),
        Params(temperature=0.3, top_k=7),
        Params(temperature=2.0, top_p=0.9),
        Params(top_k=40, top_p=0.7, min_p=0.05),
        Params(min_p=0.2),
    ],
    ids=str,
)
@pytest.mark.parametrize("size", [17, 100])
def test_draw_is_where_the_random_number_falls_among_the_kept_weights(
    size: int, params: Params
) -> None:
    rows = 6
    rng = np.random.default_rng(size)
    logits = rng.standard_normal((rows, size)).astype(np.float32)
    seeds = rng.integers(0, 2**63, rows)
    counters = rng.integers(0, 2**31, rows).astype(np.int32)
    tokens = run_sample(logits, params, seeds, counters)
    for row, uniform in enumerate(uniforms(seeds, counters)):
        ends = np.cumsum(weights_left(logits[row], params))
        assert tokens[row] == np.searchsorted(ends, uniform * ends[-1], side="right")


@pytest.mark.parametrize(
    ("params", "count"),
    [(Params(), 120), (Params(0.7, top_k=5, min_p=0.1), 60), (Params(2.0, top_p=0.7), 60)],
    ids=str,
)
def test_draws_of_many_seeds_follow_the_distribution(params: Params, count: int) -> None:
    logits = np.array([0.3, 2.1, -1.0, 1.7, 0.9, -0.4, 1.2], np.float32)
    tokens = run_sample(np.tile(logits, (count, 1)), params, columns=8)
    weights = weights_left(logits, params)
    expected = count * weights / weights.sum()
    frequencies = np.bincount(tokens, minlength=len(logits))
    assert not frequencies[weights == 0].any()
    deviations = np.sqrt(expected * (1 - expected / count))
    assert (np.abs(frequencies - expected) <= 4 * deviations + 1e-9).all()


def test_seed_and_counter_fix_the_token_however_the_vocabulary_is_cut() -> None:
    logits = np.random.default_rng(0).standard_normal((1, 40)).astype(np.float32)
    logits = np.tile(logits, (8, 1))
    params = Params(top_k=30, temperature=2.0)
    counters, seeds = np.arange(8, dtype=np.int32), np.full(8, 5)
    tokens = run_sample(logits, params, seeds, counters, columns=16)
    np.testing.assert_array_equal(run_sample(logits, params, seeds, counters, columns=64), tokens)
    assert len(set(tokens.tolist())) > 3
    assert (run_sample(logits, params, seeds + 1, counters) != tokens).any()


def test_requests_of_a_step_have_their_own_parameters() -> None:
    logits = np.array([[1.0, 3.0, 2.0, 3.0]] * 5, np.float32)
    logits[3, 2], logits[4, 0] = np.nan, np.inf
    params = [Params(temperature=0.0), Params(top_k=1), Params(top_p=0.01), Params(), Params()]
    tokens = run_sample(logits, params)
    assert tokens[0] == 1
    assert tokens[1] in (1, 3)  # both tie
    assert tokens[2] == 1
    assert tokens[3:].tolist() == [~2, ~0]


@pytest.mark.parametrize("temperature", [1e-38, 1e-3, 1.0, 1e38])
def test_impossible_tokens_are_never_drawn(temperature: float) -> None:
    logits = np.array([[-np.inf, 0.0, -np.inf, -3.0, -np.inf]] * 8, np.float32)
    tokens = set(run_sample(logits, Params(temperature), columns=8).tolist())
    assert tokens <= ({1} if temperature < 1 else {1, 3})
    whole = replace(Params(temperature), top_k=4, top_p=0.999)
    assert set(run_sample(logits, whole, columns=8).tolist()) <= {1, 3}
