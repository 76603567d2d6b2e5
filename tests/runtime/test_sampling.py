import math
from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest

from llmbuild.runtime.params import SamplingParams
from llmbuild.runtime.sampling import sample


def draws(logits, count, **options):
    params = SamplingParams(**options)
    rng = np.random.default_rng(params.seed)
    return [sample(np.array(logits, dtype=np.float32), params, rng) for _ in range(count)]


def nucleus(logits, temperature, top_k, top_p):
    """Probabilities by a plain loop in float64, for logits without ties."""
    order = sorted(range(len(logits)), key=lambda token: -logits[token])
    if top_k:
        order = order[:top_k]
    top = logits[order[0]]
    weights = {token: math.exp((logits[token] - top) / temperature) for token in order}
    total = sum(weights.values())
    kept, reached = {}, 0.0
    for token in order:
        if reached >= top_p:
            break
        kept[token] = weights[token] / total
        reached += kept[token]
    return {token: weight / sum(kept.values()) for token, weight in kept.items()}


LOGITS = [0.3, 2.1, -1.0, 1.7, 0.9, -0.4, 1.2]


def test_greedy_takes_the_first_of_the_likeliest():
    assert draws([1.0, 3.0, 3.0, -math.inf], 1) == [1]


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
@pytest.mark.parametrize(("top_k", "top_p"), [(0, 1.0), (3, 1.0), (0, 0.6), (4, 0.7), (1, 0.1)])
def test_draws_follow_the_distribution(temperature, top_k, top_p):
    count = 4000
    tokens = Counter(
        draws(LOGITS, count, temperature=temperature, top_k=top_k, top_p=top_p, seed=1)
    )
    expected = nucleus(LOGITS, temperature, top_k, top_p)
    assert set(tokens) <= set(expected)
    for token, probability in expected.items():
        deviation = math.sqrt(count * probability * (1 - probability))
        assert abs(tokens[token] - count * probability) <= 4.5 * deviation


def test_top_p_keeps_the_token_that_reaches_it_and_no_more():
    logits = np.log([0.5, 0.25, 0.125, 0.125])
    assert set(draws(logits, 300, temperature=1.0, top_p=0.5, seed=0)) == {0}
    assert set(draws(logits, 300, temperature=1.0, top_p=0.51, seed=0)) == {0, 1}


def test_top_p_reached_exactly_keeps_no_further_token():
    assert set(draws([0.0, 0.0, 0.0, 0.0], 200, temperature=1.0, top_p=0.5, seed=0)) == {0, 1}


def test_top_p_below_every_probability_keeps_the_likeliest():
    assert set(draws(LOGITS, 50, temperature=5.0, top_p=1e-300, seed=0)) == {1}


def test_top_k_beyond_the_vocabulary_keeps_all():
    assert set(draws([0.0, 0.1, 0.2], 200, temperature=1.0, top_k=99, seed=0)) == {0, 1, 2}


def test_tokens_that_tie_at_top_k_all_stay():
    assert set(draws([1.0, 1.0, 1.0, 0.0], 200, temperature=1.0, top_k=2, seed=0)) == {0, 1, 2}


@pytest.mark.parametrize("temperature", [1e-308, 1e-30, 1e308])
def test_extreme_temperatures_do_not_overflow(temperature):
    tokens = draws([-1e30, 5.0, 4.0, -math.inf], 40, temperature=temperature, seed=3)
    assert set(tokens) <= ({1} if temperature < 1 else {0, 1, 2})


def test_impossible_tokens_are_never_drawn():
    tokens = draws([-math.inf, 0.0, -math.inf, 0.0, -math.inf], 500, temperature=3.0, seed=5)
    assert set(tokens) == {1, 3}


@pytest.mark.parametrize(("draw", "token"), [(0.0, 1), (1 - 2**-53, 3), (0.5, 3), (0.4999, 1)])
def test_outermost_draws_give_possible_tokens(draw, token):
    logits = np.array([-math.inf, 0.0, -math.inf, 0.0, -math.inf], np.float32)
    generator = SimpleNamespace(random=lambda: draw)
    assert sample(logits, SamplingParams(temperature=1.0), generator) == token


def test_same_seed_gives_the_same_draws():
    first = draws(LOGITS, 30, temperature=1.0, seed=11)
    assert first == draws(LOGITS, 30, temperature=1.0, seed=11)
    assert first != draws(LOGITS, 30, temperature=1.0, seed=12)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_not_finite_give_no_token_but_tell_which(bad, temperature):
    assert draws([1.0, 2.0, bad, 0.0], 1, temperature=temperature) == [~2]


def plain_sample(logits, params, uniform):
    """The same draw with everything sorted and summed in float64."""
    shifted = logits.astype(np.float64) - logits.max()
    weights = np.exp(shifted / params.temperature)
    if 0 < params.top_k < len(weights):
        weights[shifted < np.sort(shifted)[-params.top_k]] = 0.0
    order = np.argsort(-weights, kind="stable")
    before = np.cumsum(weights[order]) - weights[order]
    if params.top_p < 1:
        weights[order[before >= params.top_p * weights.sum()]] = 0.0
    ends = np.cumsum(weights)
    return int(np.searchsorted(ends, uniform * ends[-1], side="right"))


@pytest.mark.parametrize("vocab_size", [1, 2, 63, 64, 65, 1009, 5000])
@pytest.mark.parametrize(("top_k", "top_p"), [(0, 1.0), (1, 0.5), (40, 1.0), (700, 0.9), (0, 0.97)])
@pytest.mark.parametrize("spread", [0.0, 0.01, 1.0, 9.0])
def test_draws_are_those_of_a_sorted_vocabulary(vocab_size, top_k, top_p, spread):
    """Also where many tie (logits in steps of 1/4), and where the nucleus is most of them."""
    rng = np.random.default_rng(vocab_size)
    params = SamplingParams(temperature=0.7, top_k=top_k, top_p=top_p)
    for _ in range(8):
        logits = (np.round(4 * spread * rng.standard_normal(vocab_size)) / 4).astype(np.float32)
        uniform = rng.random()
        expected = plain_sample(logits, params, uniform)
        assert sample(logits, params, SimpleNamespace(random=lambda: uniform)) == expected  # noqa: B023


def test_draw_at_the_end_of_a_block_of_tokens_is_a_possible_one():
    """Sums of blocks and of single tokens round differently."""
    rng = np.random.default_rng(0)
    impossible = np.zeros(64 * 40, bool)
    for start in range(0, len(impossible), 64):
        impossible[start : start + 5] = impossible[start + 59 : start + 64] = True
    for _ in range(20):
        logits = rng.standard_normal(len(impossible)).astype(np.float32)
        logits[impossible] = -math.inf
        ends = np.cumsum(np.exp(logits.astype(np.float64) - logits.max()))
        for end in ends[63::64]:
            for uniform in (np.nextafter(end / ends[-1], 0), min(end / ends[-1], 1 - 2**-53)):
                generator = SimpleNamespace(random=lambda uniform=uniform: uniform)
                assert not impossible[sample(logits, SamplingParams(temperature=1.0), generator)]
