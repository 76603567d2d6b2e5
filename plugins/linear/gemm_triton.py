"""quantised_linear on GPUs' tensor cores, of activations in fp16 or bf16, or rounded to int8 or
e4m3."""

import triton
import triton.language as tl

from llmbuild.plugins.common.kv_triton import narrowed
from llmbuild.plugins.common.weight_triton import load_scales, scale_places, weight_numbers


@triton.jit
def quantised_gemm(
    x,  # [T, K]: fp16 or bf16, or codes, int8 or fp8e4nv
    x_scales,  # fp32 [T, K / X_GROUP] of codes, or None
    codes,  # of [N, K] (plugins/common/weight_triton.py)
    scales,  # [N, groups]
    minima,  # [N, groups] or None
    zeros,  # int8 [N, groups] or None
    bias,  # fp32 [N] or None
    tokens,  # T
    N,
    K,
    y,  # [T, N]
    BITS: tl.constexpr,
    GROUP: tl.constexpr,  # of weights
    X_GROUP: tl.constexpr,  # of activations; 0 is the whole row for either
    TOKENS: tl.constexpr,
    FEATURES: tl.constexpr,
    DEPTH: tl.constexpr,  # columns at a time; divides K and the groups
):
    """Grid: (ceil(N / FEATURES), ceil(T / TOKENS)).

    Codes are multiplied as they are, and sums of DEPTH columns scaled, or the whole row's where it
    has one scale. Results are [features, tokens], so that weights, which need work before they are
    multiplied, may stay in registers, and that few tokens waste no tensor cores.
    """
    feature = tl.program_id(0) * FEATURES + tl.arange(0, FEATURES)
    token = tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)
    is_feature, is_token = feature < N, token < tokens
    column = tl.arange(0, DEPTH)
    codes += feature.to(tl.int64)[:, None] * (K * BITS // 8)
    codes += tl.arange(0, DEPTH * BITS // 8)[None, :]
    x += token.to(tl.int64)[None, :] * K + column[:, None]
    SUM: tl.constexpr = tl.int32 if x.dtype.element_ty == tl.int8 else tl.float32
    HAS_OFFSETS: tl.constexpr = minima is not None or zeros is not None
    IS_WEIGHT_LAST: tl.constexpr = GROUP == 0 and not HAS_OFFSETS  # its scale comes at the end
    IS_X_LAST: tl.constexpr = X_GROUP == 0
    IS_SCALED_LAST: tl.constexpr = IS_WEIGHT_LAST and IS_X_LAST
    sums = tl.zeros((FEATURES, TOKENS), SUM if IS_SCALED_LAST else tl.float32)
    for begin in range(0, K, DEPTH):
        weights = tl.load(codes + begin * BITS // 8, is_feature[:, None], other=0.0)
        weights = weight_numbers(weights, BITS, x.dtype.element_ty)
        values = tl.load(x + begin, is_token[None, :], other=0.0)
        if IS_SCALED_LAST:
            sums = tl.dot(weights, values, sums, out_dtype=SUM)
        else:
            dots = tl.dot(weights, values, out_dtype=SUM).to(tl.float32)
            if not IS_WEIGHT_LAST:
                places = scale_places(feature, begin, K, GROUP)
                scale, offset = load_scales(scales, minima, zeros, places, is_feature, BITS)
                dots *= scale[:, None]
                if HAS_OFFSETS:
                    x_sums = tl.sum(values.to(SUM), axis=0).to(tl.float32)
                    dots += offset[:, None] * x_sums[None, :]
            if not IS_X_LAST:
                dots *= load_x_scales(x_scales, token, begin, K, is_token, X_GROUP)[None, :]
            sums += dots
    result = sums.to(tl.float32)
    if IS_WEIGHT_LAST:
        scale, _ = load_scales(scales, minima, zeros, feature, is_feature, BITS)
        result *= scale[:, None]
    if IS_X_LAST:
        result *= load_x_scales(x_scales, token, 0, K, is_token, 0)[None, :]
    if bias is not None:
        result += tl.load(bias + feature, is_feature, other=0.0)[:, None]
    to = y + token.to(tl.int64)[None, :] * N + feature[:, None]
    exists = is_feature[:, None] & is_token[None, :]
    tl.store(to, narrowed(result, y.dtype.element_ty), exists)


@triton.jit
def load_x_scales(x_scales, token, column, K, is_token, X_GROUP: tl.constexpr):
    """The scale of each token's activations in a group, 1 of those that aren't codes."""
    if x_scales is None:
        scale = tl.full(token.shape, 1.0, tl.float32)
    else:
        scale = tl.load(x_scales + scale_places(token, column, K, X_GROUP), is_token, other=0.0)
    return scale
