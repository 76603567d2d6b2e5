"""quantised_gemv for any number of tokens, so that it can stand in for the kernels with tensor
cores: TensorRT takes one of all these, as its timing says."""

import triton
import triton.language as tl

from llmbuild.plugins.linear.gemv_triton import quantised_gemv


@triton.jit
def quantised_gemv_of_many(
    x,  # [T, K]
    words,
    scales,
    minima,
    zeros,
    bias,
    tokens,  # T
    N,
    W,
    y,  # [T, N]
    IS_E4M3: tl.constexpr,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    TOKENS: tl.constexpr,
    FEATURES: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """Grid: (ceil(N / FEATURES), ceil(T / TOKENS)); weights are read once for TOKENS tokens."""
    first = tl.program_id(1) * TOKENS
    quantised_gemv(
        x + first.to(tl.int64) * (W * (32 // BITS)),
        words,
        scales,
        minima,
        zeros,
        bias,
        tokens - first,
        N,
        W,
        y + first.to(tl.int64) * N,
        IS_E4M3,
        BITS,
        GROUP,
        TOKENS,
        FEATURES,
        DEPTH,
    )
