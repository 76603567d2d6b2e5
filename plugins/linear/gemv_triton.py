"""quantised_linear of a few tokens on GPUs, without tensor cores: each weight is read once."""

import triton
import triton.language as tl

from llmbuild.plugins.common.kv_triton import narrowed
from llmbuild.plugins.common.weight_triton import load_scales, scale_places

_FLOAT_2_POW_23 = tl.constexpr(0x4B000000)  # its last bit is worth 1


@triton.jit
def quantised_gemv(
    x,  # [T, K]
    words,  # int32 [N, W]: codes of [N, K] (plugins/common/weight_triton.py), K = W * 32 / BITS
    scales,  # [N, groups]
    minima,  # [N, groups] or None
    zeros,  # int8 [N, groups] or None
    bias,  # fp32 [N] or None
    tokens,  # T, at most TOKENS
    N,
    W,  # not promised to be a multiple of anything, see below
    y,  # [T, N]
    IS_E4M3: tl.constexpr,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    TOKENS: tl.constexpr,
    FEATURES: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """Grid: (ceil(N / FEATURES),). Weights are multiplied as their codes, and a word's sum scaled.

    All tensors have the dimensions of the products from the start, [tokens, features, words, codes
    of a word], and words are loaded one by one: both so that all have one layout, in which a thread
    has whole words, neighbouring threads neighbouring ones, and nothing is exchanged.
    """
    CODES: tl.constexpr = 32 // BITS
    K = W * CODES
    token = tl.arange(0, TOKENS)[:, None, None, None]
    feature = (tl.program_id(0) * FEATURES + tl.arange(0, FEATURES))[None, :, None, None]
    word = tl.arange(0, DEPTH // CODES)[None, None, :, None]
    code = tl.arange(0, CODES)[None, None, None, :]
    words += feature.to(tl.int64) * W + word
    x += token * K + word * CODES + code
    sums = tl.zeros((TOKENS, FEATURES, DEPTH // CODES, 1), tl.float32)
    for begin in range(0, K, DEPTH):
        first = begin + word * CODES
        exists = (feature < N) & (begin // CODES + word < W)
        weights = numbers_of(tl.load(words + begin // CODES, exists, other=0), code, BITS, IS_E4M3)
        values = tl.load(x + begin, (token < tokens) & (first < K), other=0.0).to(tl.float32)
        places = scale_places(feature, first, K, GROUP)
        scale, offset = load_scales(scales, minima, zeros, places, exists, BITS)
        sums += tl.sum(weights * values, axis=3, keep_dims=True) * scale
        if minima is not None or zeros is not None:
            sums += tl.sum(values, axis=3, keep_dims=True) * offset
    result = tl.sum(sums, axis=2, keep_dims=True)
    if bias is not None:
        result += tl.load(bias + feature, feature < N, other=0.0)
    exists = (token < tokens) & (feature < N)
    tl.store(y + token * N + feature, narrowed(result, y.dtype.element_ty), exists)


@triton.jit
def numbers_of(words, code, BITS: tl.constexpr, IS_E4M3: tl.constexpr):
    """The signed codes, or e4m3 numbers that aren't NaN, of words as fp32, without conversions."""
    if IS_E4M3:
        # An fp32 number of the same sign, exponent and mantissa bits is 2**120 times smaller.
        bits = ((words << (24 - 8 * code)) >> 4) & -0x78100000
        numbers = bits.to(tl.float32, bitcast=True) * 2.0**120
    else:
        HALF: tl.constexpr = 1 << (BITS - 1)
        if BITS == 8:
            words = words ^ -0x7F7F7F80  # each byte 128 more
        bits = ((words >> (BITS * code)) & (2 * HALF - 1)) | _FLOAT_2_POW_23
        numbers = bits.to(tl.float32, bitcast=True) - (8388608.0 + HALF)
    return numbers
