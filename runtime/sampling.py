"""How the next token is chosen from logits."""

import math

import numpy as np
from numpy.typing import NDArray

from llmbuild.runtime.params import SamplingParams

BLOCK = 64  # neighbouring tokens that are looked at as one first

Ids = NDArray[np.intp]
Weights = NDArray[np.float64]


def make_rng(seed: int | None) -> np.random.Generator:
    return np.random.default_rng(seed)


def sample(
    logits: NDArray[np.float32], params: SamplingParams, rng: np.random.Generator | None
) -> int:
    """The next token id from one row of logits, fp32 [vocab].

    Greedy when temperature is 0, which needs no rng; otherwise one draw of `rng` from the
    distribution left by temperature, then top-k, then top-p. Gives ~id (negative) of the largest
    logit where that isn't finite, as Executor.step_greedy does.
    """
    best = int(np.argmax(logits))
    if not math.isfinite(logits[best]):  # argmax finds a NaN or +inf wherever there is one
        return ~best
    if params.temperature == 0:
        return best
    assert rng is not None
    if 0 < params.top_k < len(logits):
        # Tokens that tie with the k-th likeliest all stay.
        ids = _largest(logits, params.top_k)
        weights = _weights(logits[ids], logits[best], params.temperature)
    else:
        ids = None
        weights = _weights(logits, logits[best], params.temperature)
    if params.top_p < 1:
        kept = _nucleus(weights, params.top_p)
        ids, weights = (kept if ids is None else ids[kept]), weights[kept]
    place = _draw(weights, rng.random())
    return place if ids is None else int(ids[place])


def _weights(logits: NDArray[np.float32], best: np.float32, temperature: float) -> Weights:
    """Unnormalised probabilities, 1 for the likeliest token."""
    # The maximum is subtracted before the division, so that no temperature overflows.
    weights = np.subtract(logits, best, dtype=np.float64)
    with np.errstate(over="ignore"):
        weights /= temperature
    return np.exp(weights, out=weights)


def _largest(values: NDArray[np.floating], count: int) -> Ids:
    """Places, ascending, of the `count` largest values and of all that tie with the least of
    them. Only the largest blocks' values are sorted out."""
    tops = np.maximum.reduceat(values, np.arange(0, len(values), BLOCK))
    if count <= len(tops):  # `count` values, the tops of these blocks, are at least this large
        places = np.flatnonzero(values >= np.partition(tops, -count)[-count])
    else:
        places = np.arange(len(values))
    values = values[places]
    return places[values >= np.partition(values, -count)[-count]]


def _nucleus(weights: Weights, top_p: float) -> Ids:
    """Places, ascending, of the largest weights: of those before which top_p of the sum isn't
    reached yet, equal ones in their order. The largest is always among them."""
    wanted = top_p * weights.sum()
    count = min(BLOCK, len(weights))
    while True:
        places = _largest(weights, count)
        order = places[np.argsort(-weights[places], kind="stable")]
        before = np.cumsum(weights[order]) - weights[order]
        kept = before < wanted
        kept[0] = True
        if not kept[-1] or len(places) == len(weights):
            return np.sort(order[kept])
        count = min(8 * count, len(weights))


def _draw(weights: Weights, uniform: float) -> int:
    """The place that a number of [0, 1) falls on when the weights stand side by side."""
    block_ends = np.cumsum(np.add.reduceat(weights, np.arange(0, len(weights), BLOCK)))
    block, rest = _find(block_ends, uniform * block_ends[-1])
    start = block * BLOCK
    return start + _find(np.cumsum(weights[start : start + BLOCK]), rest)[0]


def _find(ends: Weights, target: float) -> tuple[int, float]:
    """The range that target lies in, and how far; ranges end at `ends`, and it is none that is
    empty. What was rounded up to the very end counts as just before it."""
    target = min(target, math.nextafter(ends[-1], 0.0))
    index = int(np.searchsorted(ends, target, side="right"))
    return index, target - (ends[index - 1] if index > 0 else 0.0)
