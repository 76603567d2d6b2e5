"""Paged attention beside torch's SDPA, which reads the same keys and values from one piece of
memory a sequence, in the activations' dtype."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch

from bench.gpu.case import (
    TORCH_TYPES,
    Buffer,
    Case,
    Launch,
    Results,
    Tensors,
    empty,
    given,
    normal,
    uniform,
)
from llmbuild.plugins.common.attention_variant import LLAMA_8B, SMOLLM2, AttentionShape
from llmbuild.plugins.paged_attention.triton import (
    MAX_SPLITS,
    AttentionType,
    combine_variant,
    decode_variant,
    prefill_variant,
)

KINDS = (
    (LLAMA_8B, "bf16", "bf16"),
    (LLAMA_8B, "bf16", "int8"),
    (LLAMA_8B, "bf16", "int4"),
    (SMOLLM2, "fp16", "fp16"),
    (SMOLLM2, "bf16", "int8"),
)
BLOCKS_OF_AN_SM = 4  # programs that decode is split into, for each


def attention_cases(
    sm: int, num_sms: int, batches: Sequence[int], contexts: Sequence[int]
) -> Iterator[Case]:
    for shape, activation, kv_dtype in KINDS:
        of = attention_type(shape, activation, kv_dtype)
        for batch in batches:
            for context in contexts:
                yield decode_case(sm, of, batch, context, num_sms)
        for context in contexts:
            yield prefill_case(sm, of, context)


def attention_type(shape: AttentionShape, activation: str, kv_dtype: str) -> AttentionType:
    return AttentionType(shape, activation, kv_dtype, kv_dtype, scale=shape.head_dim**-0.5)


def choose_splits(of: AttentionType, batch: int, context: int, keys: int, num_sms: int) -> int:
    """As many as fill the GPU, each with some keys."""
    wanted = -(-BLOCKS_OF_AN_SM * num_sms // (batch * of.shape.num_kv_heads))
    return max(1, min(wanted, MAX_SPLITS, context // keys))


def decode_case(sm: int, of: AttentionType, batch: int, context: int, num_sms: int) -> Case:
    """A token of each sequence."""
    shape, decode, combine = of.shape, decode_variant(of, sm), combine_variant(of, sm)
    keys = int(decode.constants["KEYS"] or 1)
    splits = choose_splits(of, batch, context, keys, num_sms)
    parts = (batch, shape.num_heads, splits)
    buffers = _buffers(of, batch, batch, context) | {
        "partial_out": empty(torch.float32, *parts, shape.head_dim),
        "partial_stats": empty(torch.float32, *parts, 2),
    }
    combined: dict[str, str | int] = {"splits": splits}
    names = ("partial_out", "partial_stats", "query_start", "kv_lengths")
    combined |= {name: name for name in names}
    attend = _attend_arguments(buffers) | combined
    return Case(
        kernel="paged_attention_decode",
        what=_what(of),
        rows=batch,
        context=context,
        buffers=buffers,
        launches=[
            Launch(decode, (batch, shape.num_kv_heads, splits), attend),
            Launch(combine, (batch, shape.num_heads), {**combined, "out": "out"}),
        ],
        results=("out",),
        moved_bytes=_moved(of, sm, batch * context, buffers),
        competitor=partial(_sdpa, of, batch),
    )


def prefill_case(sm: int, of: AttentionType, tokens: int) -> Case:
    """A prompt, from its first token."""
    shape, variant = of.shape, prefill_variant(of, sm)
    buffers = _buffers(of, 1, tokens, tokens)
    tile = int(variant.constants["ROWS"] or 1) // shape.group
    arguments = _attend_arguments(buffers) | {"sequences": 1, "out": "out"}
    return Case(
        kernel="paged_attention_prefill",
        what=_what(of),
        rows=tokens,
        context=tokens,
        buffers=buffers,
        launches=[Launch(variant, (tokens // tile + 1, shape.num_kv_heads), arguments)],
        results=("out",),
        moved_bytes=_moved(of, sm, tokens, buffers),
        competitor=partial(_sdpa, of, 1),
    )


def _what(of: AttentionType) -> str:
    shape = of.shape
    return (
        f"{of.activation} kv {of.k_dtype} h{shape.num_heads}x{shape.num_kv_heads} d{shape.head_dim}"
    )


def _moved(of: AttentionType, sm: int, context_tokens: int, buffers: dict[str, Buffer]) -> int:
    rows = buffers["q"].size_bytes + buffers["out"].size_bytes
    return context_tokens * of.context_bytes(sm) + rows


def _buffers(of: AttentionType, sequences: int, tokens: int, context: int) -> dict[str, Buffer]:
    """Sequences of as many tokens each, over shuffled blocks; block 0 is no one's."""
    shape, dtype = of.shape, TORCH_TYPES[f"*{of.activation}"]
    width = -(-context // shape.block_size)
    order = torch.randperm(sequences * width, generator=torch.Generator().manual_seed(1)) + 1
    pool = (sequences * width + 1, shape.num_kv_heads, shape.block_size)
    width_of_q = shape.num_heads * shape.head_dim
    starts = torch.arange(sequences + 1) * (tokens // sequences)
    return {
        "q": normal(dtype, tokens, width_of_q),
        "query_start": given(starts.to(torch.int32)),
        "kv_lengths": given(torch.full((sequences,), context, dtype=torch.int32)),
        "block_tables": given(order.to(torch.int32).reshape(sequences, width)),
        **_pool(of.k_dtype, pool, shape.head_dim, "k"),
        **_pool(of.v_dtype, pool, shape.head_dim, "v"),
        "out": empty(dtype, tokens, width_of_q),
    }


def _pool(dtype: str, rows: tuple[int, ...], head_dim: int, of: str) -> dict[str, Buffer]:
    if dtype == "int4":
        return {
            f"{of}_items": uniform(torch.uint8, 0, 256, *rows, head_dim // 2),
            f"{of}_scales": uniform(torch.bfloat16, 0.1, 0.3, *rows),
            f"{of}_minima": uniform(torch.bfloat16, -2, -1, *rows),
        }
    if dtype == "int8":
        return {
            f"{of}_items": uniform(torch.int8, -127, 128, *rows, head_dim),
            f"{of}_scales": uniform(torch.float32, 0.01, 0.02, *rows),
        }
    return {f"{of}_items": normal(TORCH_TYPES[f"*{dtype}"], *rows, head_dim)}


def _attend_arguments(buffers: dict[str, Buffer]) -> dict[str, str | int]:
    """Those of decode and prefill that aren't their own."""
    inputs = ("q", "query_start", "kv_lengths", "block_tables")
    pools = [name for name in buffers if name.startswith(("k_", "v_"))]
    names = {name: name for name in (*inputs, *pools)}
    return {**names, "table_blocks": buffers["block_tables"].shape[1]}


def _sdpa(of: AttentionType, sequences: int, tensors: Tensors) -> Callable[[], Results]:
    shape = of.shape
    q = tensors["q"].unflatten(1, (shape.num_heads, shape.head_dim))
    q = q.unflatten(0, (sequences, -1)).transpose(1, 2)  # [S, H, L, D]
    context = int(tensors["kv_lengths"][0])
    k, v = (_dense(tensors, kind, context, q.dtype) for kind in "kv")

    def attend() -> Results:
        out = torch.nn.functional.scaled_dot_product_attention(
            q, k, v, is_causal=q.shape[2] > 1, scale=of.scale, enable_gqa=True
        )
        return (out.transpose(1, 2).flatten(0, 1).flatten(1),)

    return attend


def _dense(tensors: Tensors, of: str, context: int, dtype: torch.dtype) -> torch.Tensor:
    """[S, Hkv, context, D]."""
    items = tensors[f"{of}_items"]
    scales, minima = tensors.get(f"{of}_scales"), tensors.get(f"{of}_minima")
    if minima is not None:
        items = torch.stack((items & 15, items >> 4), dim=-1).flatten(-2)
    if scales is not None:
        items = items.to(scales.dtype) * scales[..., None]
    if minima is not None:
        items = items + minima[..., None]
    of_sequences = items.to(dtype)[tensors["block_tables"].long()]  # [S, B, Hkv, block, D]
    return of_sequences.transpose(1, 2).flatten(2, 3)[:, :, :context].contiguous()
