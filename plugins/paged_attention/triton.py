"""paged_attention on GPUs: decode in splits of the context, and ragged prefill.

Splits of the context: "Flash-Decoding", 2023.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import triton
import triton.language as tl

from llmbuild.plugins.common.attention_variant import (
    AttentionShape,
    pool_type,
    worth_building,
)
from llmbuild.plugins.common.kernel_variant import KernelVariant
from llmbuild.plugins.common.kv_triton import narrowed
from llmbuild.plugins.common.make_variant import make_variant
from llmbuild.plugins.common.tuning import Tiles, tuned
from llmbuild.plugins.paged_attention.attend_triton import LOG2_E, LOWEST, attend, load_queries

# Splits of a context that `combine` has room for.
MAX_SPLITS = 32


@triton.jit
def decode(
    q,  # [T, H * D]
    query_start,  # int32 [S + 1]
    kv_lengths,  # int32 [S]; 0 for padding, which is left out
    block_tables,  # int32 [S, B]
    k_channel_scale,  # fp32 [Hkv * D] or None
    k_items,
    k_scales,
    k_minima,
    v_items,
    v_scales,
    v_minima,
    partial_out,  # fp32 [S, H, splits, D]
    partial_stats,  # fp32 [S, H, splits, 2]: each split's largest score and sum
    table_blocks,  # B
    splits,
    SCALE: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    GROUP: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    PADDED: tl.constexpr,
    ROWS: tl.constexpr,  # GROUP, rounded up to what tl.dot takes
    KEYS: tl.constexpr,  # read at a time
):
    """Attention of sequences with one token each; grid: (S, Hkv, splits)."""
    sequence, head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    length = tl.load(kv_lengths + sequence)
    if length == 0:
        return
    row = tl.arange(0, ROWS)
    heads = head * GROUP + row
    exists = row < GROUP
    token = tl.load(query_start + sequence)
    queries = load_queries(
        q, k_channel_scale, token * NUM_KV_HEADS * GROUP + heads, exists, head, HEAD_DIM, PADDED
    )
    first = 0
    if WINDOW > 0:
        first = tl.maximum(length - WINDOW, 0)
    share = tl.cdiv(tl.cdiv(length - first, KEYS), splits) * KEYS
    begin = first + split * share
    out, largest, total = attend(
        queries,
        tl.full((ROWS,), 0, tl.int32) + (length - 1),
        begin,
        tl.minimum(begin + share, length),
        block_tables + sequence * table_blocks,
        head,
        k_items,
        k_scales,
        k_minima,
        v_items,
        v_scales,
        v_minima,
        tl.full((ROWS,), LOWEST, tl.float32),
        tl.zeros((ROWS,), tl.float32),
        SCALE,
        WINDOW,
        SOFT_CAP,
        NUM_KV_HEADS,
        HEAD_DIM,
        BLOCK_SIZE,
        PADDED,
        KEYS,
    )
    column = tl.arange(0, PADDED)
    parts = (sequence * NUM_KV_HEADS * GROUP + heads) * splits + split
    inside = exists[:, None] & (column < HEAD_DIM)[None, :]
    tl.store(partial_out + parts[:, None] * HEAD_DIM + column[None, :], out, inside)
    tl.store(partial_stats + parts * 2, largest, exists)
    tl.store(partial_stats + parts * 2 + 1, total, exists)


@triton.jit
def combine(
    query_start,
    kv_lengths,
    sinks,  # fp32 [H] or None
    v_channel_scale,  # fp32 [Hkv * D] or None
    partial_out,
    partial_stats,
    out,  # [T, H * D]
    splits,
    GROUP: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED: tl.constexpr,
    MAX_SPLITS: tl.constexpr,  # a power of two
):
    """The splits of `decode` in one; grid: (S, H)."""
    sequence, head = tl.program_id(0), tl.program_id(1)
    if tl.load(kv_lengths + sequence) == 0:
        return
    split = tl.arange(0, MAX_SPLITS)
    parts = (sequence * NUM_KV_HEADS * GROUP + head) * splits + split
    maxima = tl.load(partial_stats + parts * 2, split < splits, other=LOWEST)
    sums = tl.load(partial_stats + parts * 2 + 1, split < splits, other=0.0)
    largest = tl.max(maxima, axis=0)
    if sinks is not None:
        sink = tl.load(sinks + head) * LOG2_E
        largest = tl.maximum(largest, sink)
    weights = tl.exp2(maxima - largest)
    total = tl.sum(weights * sums, axis=0)
    if sinks is not None:
        total += tl.exp2(sink - largest)
    column = tl.arange(0, PADDED)
    places = partial_out + parts[:, None] * HEAD_DIM + column[None, :]
    inside = (split < splits)[:, None] & (column < HEAD_DIM)[None, :]
    parts_out = tl.load(places, inside, other=0.0)
    result = tl.sum(parts_out * weights[:, None], axis=0) / total
    if v_channel_scale is not None:
        channel = head // GROUP * HEAD_DIM + column
        result *= tl.load(v_channel_scale + channel, column < HEAD_DIM, other=0.0)
    token = tl.load(query_start + sequence)
    places = out + (token * NUM_KV_HEADS * GROUP + head) * HEAD_DIM + column
    tl.store(places, narrowed(result, out.dtype.element_ty), column < HEAD_DIM)


@triton.jit
def prefill(
    q,  # [T, H * D]
    query_start,  # int32 [S + 1]
    kv_lengths,  # int32 [S]; 0 for padding, which is left out
    block_tables,  # int32 [S, B]
    sinks,  # fp32 [H] or None
    k_channel_scale,  # fp32 [Hkv * D] or None
    v_channel_scale,
    k_items,
    k_scales,
    k_minima,
    v_items,
    v_scales,
    v_minima,
    out,  # as q; rows of no sequence stay as they are
    sequences,  # S
    table_blocks,  # B
    SCALE: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    GROUP: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    PADDED: tl.constexpr,
    ROWS: tl.constexpr,  # a tile's: the tokens that fit, each with all heads of the group
    KEYS: tl.constexpr,  # read at a time
):
    """Attention of any mix of sequences; grid: (T // (ROWS // GROUP) + S, Hkv), enough for the
    tiles of every sequence."""
    TOKENS: tl.constexpr = ROWS // GROUP
    tile, head = tl.program_id(0), tl.program_id(1)
    sequence = sequence_of_tile(query_start, sequences, tile, TOKENS)
    start = tl.load(query_start + sequence)
    tokens = tl.load(query_start + sequence + 1) - start
    first = (tile - (start // TOKENS + sequence)) * TOKENS
    length = tl.load(kv_lengths + sequence)
    if (first >= tokens) | (length == 0):
        return
    row = tl.arange(0, ROWS)
    token = first + row // GROUP
    exists = (row < TOKENS * GROUP) & (token < tokens)
    heads = head * GROUP + row % GROUP
    head_rows = (start + token) * NUM_KV_HEADS * GROUP + heads
    queries = load_queries(q, k_channel_scale, head_rows, exists, head, HEAD_DIM, PADDED)
    largest = tl.full((ROWS,), LOWEST, tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    if sinks is not None:
        largest = tl.load(sinks + heads) * LOG2_E
        total += 1.0
    computed = length - tokens
    begin = 0
    if WINDOW > 0:
        begin = tl.maximum(computed + first - WINDOW + 1, 0)
    result, largest, total = attend(
        queries,
        computed + token,
        begin,
        computed + tl.minimum(first + TOKENS, tokens),
        block_tables + sequence * table_blocks,
        head,
        k_items,
        k_scales,
        k_minima,
        v_items,
        v_scales,
        v_minima,
        largest,
        total,
        SCALE,
        WINDOW,
        SOFT_CAP,
        NUM_KV_HEADS,
        HEAD_DIM,
        BLOCK_SIZE,
        PADDED,
        KEYS,
    )
    column = tl.arange(0, PADDED)
    result /= total[:, None]
    if v_channel_scale is not None:
        channel = head * HEAD_DIM + column
        factors = tl.load(v_channel_scale + channel, column < HEAD_DIM, other=0.0)
        result *= factors[None, :]
    inside = exists[:, None] & (column < HEAD_DIM)[None, :]
    places = out + head_rows[:, None] * HEAD_DIM + column[None, :]
    tl.store(places, narrowed(result, out.dtype.element_ty), inside)


@triton.jit
def sequence_of_tile(query_start, sequences, tile, TOKENS: tl.constexpr):
    """A sequence's tiles begin with number start // TOKENS + sequence, which leaves room for those
    of all before it."""
    found = 0
    for first in range(1, sequences, 64):
        sequence = first + tl.arange(0, 64)
        starts = tl.load(query_start + sequence, sequence < sequences, other=1 << 30)
        found += tl.sum((starts // TOKENS + sequence <= tile).to(tl.int32), axis=0)
    return found


@dataclass(frozen=True)
class AttentionType:
    """What of paged_attention's inputs and attributes kernels are compiled for."""

    shape: AttentionShape
    activation: str
    k_dtype: str
    v_dtype: str
    scale: float
    window: int = 0
    soft_cap: float = 0.0
    has_sinks: bool = False
    has_channel_scales: bool = False

    @property
    def options(self) -> str:
        """What there is beyond plain attention, for the end of a kernel's name."""
        options = {
            f".window{self.window}": self.window,
            f".cap{self.soft_cap:g}": self.soft_cap,
            ".sinks": self.has_sinks,
            ".channel_scales": self.has_channel_scales,
        }
        return "".join(option for option, is_there in options.items() if is_there)

    def name(self, kernel: str) -> str:
        kernel = f"paged_attention_{kernel}"
        name = self.shape.name(kernel, self.activation, self.k_dtype, self.v_dtype)
        return name + self.options

    @property
    def constants(self) -> dict[str, int | float]:
        """Of `decode` and `prefill`."""
        options = {"SCALE": self.scale, "WINDOW": self.window, "SOFT_CAP": self.soft_cap}
        return {**self.shape.constants, "GROUP": self.shape.group, **options}

    def input_types(self, sm: int) -> dict[str, str | None]:
        """Those of `decode` and `prefill`."""
        return {
            "q": f"*{self.activation}",
            **dict.fromkeys(("query_start", "kv_lengths", "block_tables"), "*i32"),
            "k_channel_scale": "*fp32" if self.has_channel_scales else None,
            **pool_type(self.k_dtype, sm).arguments("k"),
            **pool_type(self.v_dtype, sm).arguments("v"),
            "table_blocks": "i32",
        }

    @property
    def result_types(self) -> dict[str, str | None]:
        """Those of `combine` and `prefill`."""
        return {
            "sinks": "*fp32" if self.has_sinks else None,
            "v_channel_scale": "*fp32" if self.has_channel_scales else None,
            "out": f"*{self.activation}",
        }

    def context_bytes(self, sm: int) -> int:
        """Read for each token of a context."""
        kinds = (pool_type(dtype, sm) for dtype in (self.k_dtype, self.v_dtype))
        return self.shape.num_kv_heads * sum(kind.row_bytes(self.shape.head_dim) for kind in kinds)


def attention_tiles(kernel: str, shape: AttentionShape, sm: int) -> Tiles:
    """Tiles are tuned for heads of up to 128 elements, and take fewer of wider ones. A tile has
    room for a token's whole group."""
    tiles = tuned(f"paged_attention.{kernel}", sm)
    times = max(shape.padded // 128, 1)
    rows = max(tiles.rows // times, triton.next_power_of_2(shape.group), 16)
    keys = max(tiles.columns // times // max(rows // 64, 1), 16)
    return replace(tiles, rows=rows, columns=keys)


_SCRATCH = {"partial_out": "*fp32", "partial_stats": "*fp32", "splits": "i32"}


def decode_variant(of: AttentionType, sm: int) -> KernelVariant:
    tiles = attention_tiles("decode", of.shape, sm)
    return make_variant(
        of.name("decode"),
        decode,
        {**of.input_types(sm), **_SCRATCH},
        {**of.constants, "ROWS": tiles.rows, "KEYS": tiles.columns},
        tiles,
        bytes_per_token=f"{of.context_bytes(sm)} a token of the context",
    )


def combine_variant(of: AttentionType, sm: int) -> KernelVariant:
    """Of `decode`; the dtypes of the KV cache make no difference."""
    shape = of.shape
    names = ("NUM_KV_HEADS", "HEAD_DIM", "PADDED", "GROUP")
    heads = f"h{shape.num_heads}x{shape.num_kv_heads}.d{shape.head_dim}"
    return make_variant(
        f"paged_attention_combine.{of.activation}.{heads}{of.options}",
        combine,
        {"query_start": "*i32", "kv_lengths": "*i32", **_SCRATCH, **of.result_types},
        {**{name: of.constants[name] for name in names}, "MAX_SPLITS": MAX_SPLITS},
        tuned("paged_attention.combine", sm),
        bytes_per_token=f"{4 * shape.num_heads * (shape.head_dim + 2)} a split",
    )


def prefill_variant(of: AttentionType, sm: int) -> KernelVariant:
    tiles = attention_tiles("prefill", of.shape, sm)
    return make_variant(
        of.name("prefill"),
        prefill,
        {**of.input_types(sm), **of.result_types, "sequences": "i32"},
        {**of.constants, "ROWS": tiles.rows, "KEYS": tiles.columns},
        tiles,
        bytes_per_token=f"{of.context_bytes(sm)} a token of the context and tile of queries",
    )


def variants(sm: int) -> Iterator[KernelVariant]:
    combines = {}
    for shape, activation, kv_dtypes in worth_building():
        of = AttentionType(
            shape,
            activation,
            *kv_dtypes,
            scale=shape.head_dim**-0.5,
            has_channel_scales="int8-static" in kv_dtypes,
        )
        yield decode_variant(of, sm)
        yield prefill_variant(of, sm)
        combine_of = combine_variant(of, sm)
        combines[combine_of.name] = combine_of
    yield from combines.values()
