"""Sampling on GPUs: the likeliest token of each row of logits, or a draw as runtime/sampling.py's.

Two kernels one after the other: the best token of each part of the vocabulary, then of the parts a
row's, and the draw.
"""

from collections.abc import Iterator

import triton
import triton.language as tl

from llmbuild.plugins.common.kernel_variant import KernelVariant
from llmbuild.plugins.common.make_variant import make_variant
from llmbuild.plugins.common.tuning import tuned
from llmbuild.plugins.sample.draw_triton import (
    INF_RANK,
    MINUS_INF_RANK,
    kept_tokens,
    kept_weight,
    load_tokens,
    logits_of,
    token_at,
)

_LAST_TOKEN = tl.constexpr(0x7FFFFFFF)


@triton.jit
def best_of_parts(
    logits,  # [R, V]
    V,
    best,  # int64 [R, P]: rank, and in the low half 2**31 - 1 - token
    COLUMNS: tl.constexpr,
):
    """Grid: (R, P), P = ceil(V / COLUMNS)."""
    row = tl.program_id(0).to(tl.int64)
    begin = tl.program_id(1) * COLUMNS
    tokens, _, ranks = load_tokens(logits + row * V, begin, V, COLUMNS)
    candidates = (ranks.to(tl.int64) << 32) | (tokens ^ _LAST_TOKEN).to(tl.int64)
    tl.store(best + row * tl.num_programs(1) + tl.program_id(1), tl.max(candidates, axis=0))


@triton.jit
def greedy(
    best,  # int64 [R, P], of best_of_parts
    parts,  # P
    tokens,  # int32 [R]: the likeliest, the first of those that tie; ~id if its logit isn't finite
    PARTS: tl.constexpr,  # looked at together
):
    """Grid: (R,)."""
    _, token = best_of_row(best, parts, PARTS)
    tl.store(tokens + tl.program_id(0), token)


@triton.jit
def sample(
    logits,  # [R, V]
    best,  # int64 [R, P], of best_of_parts
    temperatures,  # fp32 [R]; 0 takes the likeliest
    top_ks,  # int32 [R]; 0 is none
    top_ps,  # fp32 [R]; 1 is none
    min_ps,  # fp32 [R]: the least probability that is kept, as part of the likeliest's; 0 is none
    seeds,  # int64 [R]
    counters,  # int32 [R]: which of a seed's draws
    V,
    parts,  # P
    tokens,  # int32 [R]: drawn; ~id of the likeliest if its logit isn't finite
    PARTS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Grid: (R,)."""
    row = tl.program_id(0)
    rank, token = best_of_row(best, parts, PARTS)
    temperature = tl.load(temperatures + row)
    if (token >= 0) & (temperature > 0.0):
        at = logits + row.to(tl.int64) * V
        top_k, top_p = tl.load(top_ks + row), tl.load(top_ps + row)
        last, end = kept_tokens(at, V, rank, temperature, top_k, top_p, COLUMNS)
        likeliest = logits_of(rank)
        min_p = tl.minimum(tl.load(min_ps + row), 1.0)
        least = tl.ceil(min_p * 1073741824.0).to(tl.int32)  # 2**30
        weight = kept_weight(at, V, last, end, least, likeliest, temperature, COLUMNS)
        high, low, _, _ = tl.randint4x(tl.load(seeds + row), tl.load(counters + row))
        bits = (high.to(tl.uint32, bitcast=True).to(tl.uint64) << 32) | low.to(
            tl.uint32, bitcast=True
        ).to(tl.uint64)
        target = tl.umulhi(bits, weight.to(tl.uint64)).to(tl.int64)
        token = token_at(at, V, target, last, end, least, likeliest, temperature, True, COLUMNS)
    tl.store(tokens + row, token)


@triton.jit
def best_of_row(best, parts, PARTS: tl.constexpr):
    """The rank of this program's row's best token, and the token, as ~id if it isn't finite."""
    lowest = -0x7FFFFFFFFFFFFFFF
    found = tl.full((PARTS,), lowest, tl.int64)
    for begin in range(0, parts, PARTS):
        part = begin + tl.arange(0, PARTS)
        places = best + tl.program_id(0).to(tl.int64) * parts + part
        found = tl.maximum(found, tl.load(places, part < parts, other=lowest))
    candidate = tl.max(found, axis=0)
    rank = (candidate >> 32).to(tl.int32)
    token = (candidate & _LAST_TOKEN).to(tl.int32) ^ _LAST_TOKEN
    is_finite = (rank < INF_RANK) & (rank > MINUS_INF_RANK)
    return rank, tl.where(is_finite, token, ~token)


def variants(sm: int) -> Iterator[KernelVariant]:
    yield best_variant(sm)
    yield greedy_variant(sm)
    yield sample_variant(sm)


def best_variant(sm: int) -> KernelVariant:
    tiles = tuned("sample.parts", sm)
    return make_variant(
        "best_of_parts.fp32",
        best_of_parts,
        {"logits": "*fp32", "V": "i32", "best": "*i64"},
        {"COLUMNS": tiles.columns},
        tiles,
        bytes_per_token="4 * V",
        multiples_of_16=("V",),
    )


def greedy_variant(sm: int) -> KernelVariant:
    tiles = tuned("sample.greedy", sm)
    return make_variant(
        "greedy",
        greedy,
        {"best": "*i64", "parts": "i32", "tokens": "*i32"},
        {"PARTS": tiles.columns},
        tiles,
        bytes_per_token="8 * P",
    )


def sample_variant(sm: int) -> KernelVariant:
    tiles = tuned("sample.draw", sm)
    types = {
        "logits": "*fp32",
        "best": "*i64",
        "temperatures": "*fp32",
        "top_ks": "*i32",
        "top_ps": "*fp32",
        "min_ps": "*fp32",
        "seeds": "*i64",
        "counters": "*i32",
        "V": "i32",
        "parts": "i32",
        "tokens": "*i32",
    }
    return make_variant(
        "sample.fp32",
        sample,
        types,
        {"PARTS": tuned("sample.greedy", sm).columns, "COLUMNS": tiles.columns},
        tiles,
        bytes_per_token="4 * V a pass, most of them from the L2",
        multiples_of_16=("V",),
    )
