"""Dequantised values against loops over the block layouts that ggml publishes (ggml-common.h)."""

import struct
from pathlib import Path

import gguf
import ml_dtypes
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Type

from llmbuild.builder.checkpoint import open_checkpoint


def half(block: bytes, offset: int) -> float:
    return struct.unpack_from("<e", block, offset)[0]


def decode_q4_0(block: bytes) -> list[float]:
    scale, codes = half(block, 0), block[2:18]
    values = [c & 15 for c in codes] + [c >> 4 for c in codes]
    return [scale * (v - 8) for v in values]


def decode_q4_1(block: bytes) -> list[float]:
    scale, minimum, codes = half(block, 0), half(block, 2), block[4:20]
    values = [c & 15 for c in codes] + [c >> 4 for c in codes]
    return [scale * v + minimum for v in values]


def five_bits(high: bytes, codes: bytes) -> list[int]:
    (bits,) = struct.unpack("<I", high)
    low = [c & 15 for c in codes] + [c >> 4 for c in codes]
    return [v | ((bits >> j & 1) << 4) for j, v in enumerate(low)]


def decode_q5_0(block: bytes) -> list[float]:
    return [half(block, 0) * (v - 16) for v in five_bits(block[2:6], block[6:22])]


def decode_q5_1(block: bytes) -> list[float]:
    scale, minimum = half(block, 0), half(block, 2)
    return [scale * v + minimum for v in five_bits(block[4:8], block[8:24])]


def decode_q8_0(block: bytes) -> list[float]:
    return [half(block, 0) * v for v in struct.unpack_from("<32b", block, 2)]


def scale_and_minimum(packed: bytes, j: int) -> tuple[int, int]:
    """Sub-block j's 6-bit scale and minimum, of eight in twelve bytes."""
    if j < 4:
        return packed[j] & 63, packed[j + 4] & 63
    return (
        packed[j + 4] & 15 | (packed[j - 4] >> 6) << 4,
        packed[j + 4] >> 4 | (packed[j] >> 6) << 4,
    )


def decode_k4_or_k5(block: bytes, high: bytes, codes: bytes) -> list[float]:
    scale, minimum = half(block, 0), half(block, 2)
    values = []
    for j in range(8):
        sub_scale, sub_minimum = scale_and_minimum(block[4:16], j)
        for i in range(32):
            code = codes[j // 2 * 32 + i]
            code = code >> 4 if j % 2 else code & 15
            code += 16 * (high[i] >> j & 1)
            values.append(scale * sub_scale * code - minimum * sub_minimum)
    return values


def decode_q4_k(block: bytes) -> list[float]:
    return decode_k4_or_k5(block, bytes(32), block[16:144])


def decode_q5_k(block: bytes) -> list[float]:
    return decode_k4_or_k5(block, block[16:48], block[48:176])


def decode_q6_k(block: bytes) -> list[float]:
    low, high, scales = block[0:128], block[128:192], struct.unpack_from("<16b", block, 192)
    values = []
    for i in range(256):
        side, quarter, k = i // 128, i % 128 // 32, i % 32
        nibble = low[side * 64 + quarter % 2 * 32 + k]
        nibble = nibble >> 4 if quarter >= 2 else nibble & 15
        code = nibble | (high[side * 32 + k] >> 2 * quarter & 3) << 4
        values.append(half(block, 208) * scales[i // 16] * (code - 32))
    return values


DECODERS = {
    Type.Q4_0: decode_q4_0,
    Type.Q4_1: decode_q4_1,
    Type.Q5_0: decode_q5_0,
    Type.Q5_1: decode_q5_1,
    Type.Q8_0: decode_q8_0,
    Type.Q4_K: decode_q4_k,
    Type.Q5_K: decode_q5_k,
    Type.Q6_K: decode_q6_k,
}


@pytest.mark.parametrize("kind", DECODERS, ids=lambda kind: kind.name)
def test_quantised_tensor_reads_as_its_published_layout_says(
    kind, write_gguf, llama_metadata, quantised
):
    rows, columns = 7, 3 * gguf.GGML_QUANT_SIZES[kind][0]
    packed = quantised(kind, rows, columns)
    embedding = np.zeros((10, 32), np.float32)
    path = write_gguf(
        llama_metadata,
        {"token_embd.weight": embedding, "blk.0.ffn_up.weight": (kind, packed)},
    )
    checkpoint = open_checkpoint(path)
    assert checkpoint.tensors["blk.0.ffn_up.weight"].dtype == kind.name
    assert checkpoint.tensors["blk.0.ffn_up.weight"].shape == (rows, columns)

    values = checkpoint.read("blk.0.ffn_up.weight")

    block_bytes = gguf.GGML_QUANT_SIZES[kind][1]
    blocks = packed.reshape(-1, block_bytes)
    expected = np.array([DECODERS[kind](block.tobytes()) for block in blocks])
    assert values.dtype == np.float32
    assert values.shape == (rows, columns)
    # float32 rounds twice where the loops compute in float64; a minimum can cancel the product.
    largest = np.abs(expected).max()
    np.testing.assert_allclose(values, expected.reshape(rows, columns), 3e-7, 3e-7 * largest)


def test_tensor_of_more_blocks_than_one_read_is_whole(write_gguf, llama_metadata):
    data = np.random.default_rng(1).normal(size=(1031, 1024)).astype(np.float32)
    packed = gguf.quants.quantize(data, Type.Q8_0)
    embedding = np.zeros((10, 32), np.float32)
    path = write_gguf(
        llama_metadata, {"token_embd.weight": embedding, "output.weight": (Type.Q8_0, packed)}
    )
    values = open_checkpoint(path).read("output.weight")
    step = np.abs(data.reshape(-1, 32)).max(1, keepdims=True) / 127
    error = np.abs(values - data).reshape(-1, 32)
    assert (error <= 0.5 * step * 1.01 + 1e-3 * np.abs(data).reshape(-1, 32)).all()


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_plain_tensor_reads_as_stored(dtype, write_gguf, llama_metadata):
    data = np.random.default_rng(2).normal(size=(13, 32)).astype(dtype)
    stored = (Type.BF16, data.view(np.uint8)) if dtype == ml_dtypes.bfloat16 else data
    path = write_gguf(llama_metadata, {"token_embd.weight": stored})
    values = open_checkpoint(path).read("token_embd.weight")
    assert values.dtype == dtype
    np.testing.assert_array_equal(values, data)


def test_values_equal_the_gguf_readers_own(write_gguf, llama_metadata, quantised, tmp_path: Path):
    tensors = {
        "token_embd.weight": (Type.Q6_K, quantised(Type.Q6_K, 5, 256)),
        "blk.0.attn_q.weight": (Type.Q4_K, quantised(Type.Q4_K, 3, 512)),
        "output_norm.weight": np.arange(7, dtype=np.float32),
    }
    path = write_gguf(llama_metadata, tensors)
    checkpoint = open_checkpoint(path)
    reader = gguf.GGUFReader(path)
    assert {tensor.name for tensor in reader.tensors} == set(checkpoint.tensors)
    for tensor in reader.tensors:
        expected = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        np.testing.assert_array_equal(checkpoint.read(tensor.name), expected)
        assert checkpoint.tensors[tensor.name].shape == tuple(reversed(tensor.shape.tolist()))
