"""Which tokens sampling keeps, and a draw from those, without sorting: a search over logits' ranks,
each step a pass over the vocabulary.

Ranks are whole numbers in the logits' order. Weights are exp((logit - best) / temperature) in
units of 2**-30, so that sums are exact in any order, and a seed gives the same token always.
"""

import triton
import triton.language as tl

NAN_RANK = tl.constexpr(0x7FFFFFFF)
INF_RANK = tl.constexpr(0x7F800000)
MINUS_INF_RANK = tl.constexpr(-0x7F800001)
NO_RANK = tl.constexpr(-0x80000000)  # of a token beyond the vocabulary
_WEIGHT_OF_BEST = tl.constexpr(float(1 << 30))


@triton.jit
def ranks_of(logits):
    """int32 in the order of fp32 logits: both zeros the same, NaN above all."""
    bits = tl.where(logits == 0.0, 0.0, logits).to(tl.int32, bitcast=True)
    return tl.where(logits != logits, NAN_RANK, bits ^ ((bits >> 31) & 0x7FFFFFFF))


@triton.jit
def logits_of(ranks):
    return (ranks ^ ((ranks >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def weights_of(logits, best, temperature):
    """int32, 2**30 for the best logit."""
    weights = tl.exp((logits - best) / temperature)
    return (weights * _WEIGHT_OF_BEST + 0.5).to(tl.int32)


@triton.jit
def load_tokens(row, begin, V, COLUMNS: tl.constexpr):
    """Tokens from `begin` on, their logits and ranks."""
    tokens = begin + tl.arange(0, COLUMNS)
    logits = tl.load(row + tokens, tokens < V, other=-float("inf")).to(tl.float32)
    return tokens, logits, tl.where(tokens < V, ranks_of(logits), NO_RANK)


@triton.jit
def last_rank(
    row, V, low, high, wanted, best, temperature, BY_WEIGHT: tl.constexpr, COLUMNS: tl.constexpr
):
    """The largest rank that, with all above it, reaches `wanted` tokens, or weight with BY_WEIGHT;
    and what those above it amount to.

    low, high: int64 ranks, such that low reaches it and high, above all, doesn't. A step moves
    either to a rank that a token has, so that few are needed.
    """
    above = tl.zeros((), tl.int64)
    while high - low > 1:
        middle = (low + (high - low) // 2).to(tl.int32)
        amounts = tl.zeros((COLUMNS,), tl.int64)
        least = tl.full((COLUMNS,), NAN_RANK, tl.int32)
        most = tl.full((COLUMNS,), NO_RANK, tl.int32)
        for begin in range(0, V, COLUMNS):
            _, logits, ranks = load_tokens(row, begin, V, COLUMNS)
            reached = ranks >= middle
            each = weights_of(logits, best, temperature) if BY_WEIGHT else 1
            amounts += tl.where(reached, each, 0)
            least = tl.minimum(least, tl.where(reached, ranks, NAN_RANK))
            most = tl.maximum(most, tl.where(reached, NO_RANK, ranks))
        amount = tl.sum(amounts, axis=0)
        if amount >= wanted:
            low = tl.min(least, axis=0).to(tl.int64)
        else:
            high = tl.max(most, axis=0).to(tl.int64) + 1
            above = amount
    return low, above


@triton.jit
def keeps(tokens, ranks, last, end):
    """Tokens above the rank `last`, and of those that tie there the ones before `end`."""
    return (ranks > last) | ((ranks == last) & (tokens < end))


@triton.jit
def kept_weights(tokens, logits, ranks, last, end, least_weight, best, temperature):
    weights = weights_of(logits, best, temperature)
    kept = keeps(tokens, ranks, last, end) & (weights >= least_weight)
    return tl.where(kept, weights, 0).to(tl.int64)


@triton.jit
def kept_weight(row, V, last, end, least_weight, best, temperature, COLUMNS: tl.constexpr):
    """Of all tokens that are kept."""
    sums = tl.zeros((COLUMNS,), tl.int64)
    for begin in range(0, V, COLUMNS):
        tokens, logits, ranks = load_tokens(row, begin, V, COLUMNS)
        sums += kept_weights(tokens, logits, ranks, last, end, least_weight, best, temperature)
    return tl.sum(sums, axis=0)


@triton.jit
def token_at(
    row,
    V,
    target,
    last,
    end,
    least_weight,
    best,
    temperature,
    BY_WEIGHT: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """The token that `target` falls on when the weights of those kept stand side by side; without
    BY_WEIGHT, the one that `target` others of rank `last` come before."""
    found = tl.zeros((), tl.int32) + V
    passed = tl.zeros((), tl.int64)
    for begin in range(0, V, COLUMNS):
        tokens, logits, ranks = load_tokens(row, begin, V, COLUMNS)
        if BY_WEIGHT:
            widths = kept_weights(tokens, logits, ranks, last, end, least_weight, best, temperature)
        else:
            widths = (ranks == last).to(tl.int64)
        ends = passed + tl.cumsum(widths, axis=0)
        found = tl.minimum(found, tl.min(tl.where(ends > target, tokens, V), axis=0))
        passed += tl.sum(widths, axis=0)
    return found


@triton.jit
def kept_tokens(row, V, best_rank, temperature, top_k, top_p, COLUMNS: tl.constexpr):
    """The tokens that top-k, then top-p keep, as `keeps` takes them: the least rank, and before
    which token those of that rank are.

    top-k keeps all that tie with the k-th; top-p, of the weight left, those before which it isn't
    reached, in order of their ids where they tie.
    """
    best = logits_of(best_rank)
    high = best_rank.to(tl.int64) + 1
    last = tl.full((), MINUS_INF_RANK, tl.int64)
    end = tl.zeros((), tl.int32) + V
    if (top_k > 0) & (top_k < V):
        last, _ = last_rank(row, V, last, high, top_k, best, temperature, False, COLUMNS)
    if top_p < 1.0:
        weight = kept_weight(row, V, last.to(tl.int32), end, 0, best, temperature, COLUMNS)
        wanted = tl.ceil(weight.to(tl.float64) * top_p.to(tl.float64)).to(tl.int64)
        wanted = tl.maximum(wanted, 1)
        last, above = last_rank(row, V, last, high, wanted, best, temperature, True, COLUMNS)
        each = weights_of(logits_of(last.to(tl.int32)), best, temperature).to(tl.int64)
        before = (wanted - above - 1) // each  # that tie with the one that reaches it
        rank = last.to(tl.int32)
        end = 1 + token_at(row, V, before, rank, end, 0, best, temperature, False, COLUMNS)
    return last.to(tl.int32), end
