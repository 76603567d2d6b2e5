"""Rows of K or V in a GPU's KV pool, read and written by Triton kernels.

A pool is items [blocks, Hkv, block_size, D]; a row is a token's D items of one head. The type of
the items, and which of the other two tensors a pool has, say what an item is:

| KV dtype | items | scales, minima [blocks, Hkv, block_size] |
|---|---|---|
| `fp32`, `fp16`, `bf16` | the element | none |
| `int8-static` | int8 | none |
| `int8` | int8 | fp32 scales |
| `fp8` | e4m3, as uint8, or as fp8e4nv where an SM converts those | none |
| `int4` | uint8 [.., D / 2], the even element in the low four bits | bf16 scales and minima |

An element is minimum + scale * code. What isn't there is None, and no argument of the kernel.
Rounding is that of docs/step-graph.md, except that a compiler may fuse a product into the sum after
it.
"""

import triton
import triton.language as tl

_ROUND_TO_INTEGER = tl.constexpr(12582912.0)  # 1.5 * 2**23: its last bit is worth 1
_ROUND_TO_512THS = tl.constexpr(16384.0)  # 2**14: its last bit is worth 2**-9
_E4M3_SMALLEST_NORMAL = tl.constexpr(2.0**-6)


@triton.jit
def slot_rows(
    block_table, positions, exists, head, NUM_KV_HEADS: tl.constexpr, BLOCK_SIZE: tl.constexpr
):
    """Where a head's rows at some positions lie, counted in rows of the pool. block_table: of one
    sequence, or of each position's."""
    blocks = tl.load(block_table + positions // BLOCK_SIZE, exists, other=0).to(tl.int64)
    return (blocks * NUM_KV_HEADS + head) * BLOCK_SIZE + positions % BLOCK_SIZE


@triton.jit
def load_codes(
    items, minima, rows, exists, HEAD_DIM: tl.constexpr, PADDED: tl.constexpr, TO: tl.constexpr
):
    """Codes [rows, PADDED], 0 where a row or column doesn't exist. TO: a type that holds them."""
    if minima is not None:
        column = tl.arange(0, PADDED // 2)
        places = items + rows[:, None] * (HEAD_DIM // 2) + column[None, :]
        inside = exists[:, None] & (column < HEAD_DIM // 2)[None, :]
        pairs = tl.load(places, inside, other=0)
        codes = tl.interleave(pairs & 15, pairs >> 4)
    else:
        column = tl.arange(0, PADDED)
        places = items + rows[:, None] * HEAD_DIM + column[None, :]
        codes = tl.load(places, exists[:, None] & (column < HEAD_DIM)[None, :], other=0.0)
        if items.dtype.element_ty == tl.uint8:
            codes = decode_e4m3(codes)
    return codes.to(TO)


@triton.jit
def decode_e4m3(codes):
    """fp16 numbers of e4m3 bytes: fp16 with the same bits has an exponent that is 8 less."""
    bits = codes.to(tl.uint16)
    shifted = ((bits & 0x80) << 8) | ((bits & 0x7F) << 7)
    numbers = shifted.to(tl.float16, bitcast=True) * 256.0
    return tl.where((bits & 0x7F) == 0x7F, float("nan"), numbers)


@triton.jit
def store_rows(
    items, scales, minima, rows, x, exists, HEAD_DIM: tl.constexpr, PADDED: tl.constexpr
):
    """Round x, fp32 [rows, PADDED] with zeros after HEAD_DIM columns, to what the pool keeps."""
    column = tl.arange(0, PADDED)
    if minima is not None:
        codes, scale, minimum = range_codes(x, (column < HEAD_DIM)[None, :])
        tl.store(scales + rows, scale.to(scales.dtype.element_ty), exists)
        tl.store(minima + rows, minimum.to(minima.dtype.element_ty), exists)
        low, high = tl.split(tl.reshape(codes, (x.shape[0], PADDED // 2, 2)))
        pair = tl.arange(0, PADDED // 2)
        places = items + rows[:, None] * (HEAD_DIM // 2) + pair[None, :]
        inside = exists[:, None] & (pair < HEAD_DIM // 2)[None, :]
        tl.store(places, low | (high << 4), inside)
    else:
        if scales is not None:
            codes, scale = scaled_codes(x)
            tl.store(scales + rows, scale, exists)
        elif items.dtype.element_ty == tl.int8:
            is_number = x == x
            codes = tl.where(is_number, nearest_integer(tl.clamp(x, -127.0, 127.0)), 0.0)
            codes = codes.to(tl.int8)
        elif items.dtype.element_ty.is_fp8() or items.dtype.element_ty == tl.uint8:
            codes = encode_e4m3(x).to(items.dtype.element_ty, bitcast=True)
        else:
            codes = narrowed(x, items.dtype.element_ty)
        places = items + rows[:, None] * HEAD_DIM + column[None, :]
        tl.store(places, codes, exists[:, None] & (column < HEAD_DIM)[None, :])


@triton.jit
def scaled_codes(x):
    """int8 codes, and a scale for each row, NaN where the row holds a NaN or an infinity."""
    largest = tl.max(tl.abs(x), axis=1) + tl.sum(x * 0.0, axis=1)
    inverse = tl.div_rn(127.0, largest)
    has_steps = inverse < float("inf")  # a row of zeros has none, nor one with a NaN
    codes = nearest_integer(tl.where(has_steps[:, None], x * inverse[:, None], 0.0))
    return codes.to(tl.int8), tl.div_rn(largest, 127.0)


@triton.jit
def range_codes(x, inside):
    """Codes of four bits, and each row's scale and minimum; 0, 0 and NaN for a row that holds a NaN
    or an infinity or whose range isn't finite in bf16."""
    minimum = nearest_bf16(tl.min(tl.where(inside, x, float("inf")), axis=1))
    largest = tl.max(tl.where(inside, x, -float("inf")), axis=1)
    scale = nearest_bf16(tl.maximum(tl.div_rn(largest - minimum, 15.0), 0.0))
    inverse = tl.div_rn(1.0, scale)
    wrong = tl.sum(x * 0.0, axis=1) + minimum * 0.0 + scale * 0.0  # 0, or NaN
    has_steps = (wrong == 0.0) & (inverse < float("inf"))
    steps = (x - minimum[:, None]) * inverse[:, None]
    codes = nearest_integer(tl.clamp(tl.where(has_steps[:, None], steps, 0.0), 0.0, 15.0))
    return codes.to(tl.uint8), tl.where(wrong == 0.0, scale, 0.0), minimum + wrong


@triton.jit
def encode_e4m3(x):
    """The nearest e4m3 numbers' bytes, ties to even: beyond the largest, 448, the largest; NaN for
    an infinity."""
    bits = x.to(tl.uint32, bitcast=True)
    magnitude = tl.abs(x)
    unsigned = bits & 0x7FFFFFFF
    # Three of 23 bits stay, and the exponent's bias becomes 7 instead of 127.
    normal = ((unsigned + 0x7FFFF + ((unsigned >> 20) & 1)) >> 20) - (120 << 3)
    small = (magnitude + _ROUND_TO_512THS).to(tl.uint32, bitcast=True) & 0xFF
    code = tl.where(magnitude < _E4M3_SMALLEST_NORMAL, small, tl.minimum(normal, 0x7E))
    code = tl.where(unsigned >= 0x7F800000, 0x7F, code)
    return (code | ((bits >> 24) & 0x80)).to(tl.uint8)


@triton.jit
def nearest_integer(x):
    """Ties to even, for magnitudes below 2**22."""
    return (x + _ROUND_TO_INTEGER) - _ROUND_TO_INTEGER


@triton.jit
def nearest_bf16(x):
    """fp32 numbers rounded to what bf16 holds, ties to even; as integers, since Triton's
    interpreter cuts the rest off."""
    bits = x.to(tl.uint32, bitcast=True)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
    is_number = x == x
    return tl.where(is_number, rounded.to(tl.float32, bitcast=True), x)


@triton.jit
def narrowed(x, TO: tl.constexpr):
    """fp32 numbers as another floating-point type, ties to even."""
    if tl.bfloat16 == TO:
        x = nearest_bf16(x)
    return x.to(TO)
