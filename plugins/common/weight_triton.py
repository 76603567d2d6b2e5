"""Quantised weights [N, K] as GPU kernels read them; builder/targets/gpu/pack.py makes them.

Codes lie row after row, and scales with them, fp16 [N, groups]: neighbouring threads take
neighbouring columns, so that a warp reads a run of a row.

| weights | BITS | codes | a weight is |
|---|---|---|---|
| int4 | 4 | uint8 [N, K / 2], the even column in the low four bits | scale * (code - 8) |
| int8 | 8 | int8 [N, K], the grid's code - 128 | scale * code |
| e4m3 | 8 | fp8e4nv [N, K], or uint8 where an SM doesn't convert those | scale * number |

Grids with minima have the grid's own code in place of the signed one, and add `minima`, as scales
are; those with zero points subtract `zeros`, int8 [N, groups] and signed as int8 codes are, from
the signed code first. A GROUP of 0 is the whole row.
"""

import triton
import triton.language as tl

from llmbuild.plugins.common.kv_triton import decode_e4m3

_FLOAT_2_POW_23 = tl.constexpr(0x4B000000)  # its last bit is worth 1


@triton.jit
def scale_places(row, column, K, GROUP: tl.constexpr):
    """Where the scales of a weight's groups lie."""
    return row + column * 0 if GROUP == 0 else row * (K // GROUP) + column // GROUP


@triton.jit
def weight_numbers(codes, BITS: tl.constexpr, TO: tl.constexpr):
    """Signed codes as numbers of a type that holds them all, twice as many as bytes for int4."""
    if BITS == 4:
        nibbles = tl.interleave(codes & 15, codes >> 4)
        if tl.int8 == TO:
            numbers = nibbles.to(tl.int8) - 8
        else:
            # The number 2**23 + nibble, without a conversion.
            shifted = (nibbles.to(tl.int32) | _FLOAT_2_POW_23).to(tl.float32, bitcast=True)
            numbers = (shifted - 8388616.0).to(TO)
    elif codes.dtype == tl.uint8:
        numbers = decode_e4m3(codes).to(TO)
    else:
        numbers = codes.to(TO)
    return numbers


@triton.jit
def load_scales(scales, minima, zeros, places, exists, BITS: tl.constexpr):
    """Scales of signed codes, and what each weight of a group adds to scale * code; fp32."""
    scale = tl.load(scales + places, exists, other=0.0).to(tl.float32)
    offset = scale * 0.0
    if minima is not None:
        HALF: tl.constexpr = 2.0 ** (BITS - 1)
        offset = tl.load(minima + places, exists, other=0.0).to(tl.float32) + scale * HALF
    if zeros is not None:
        offset = -tl.load(zeros + places, exists, other=0).to(tl.float32) * scale
    return scale, offset
