"""Rotary and the write of K and V into pools, beside torch's way, which writes in place, too."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch

from bench.gpu.case import TORCH_TYPES, Case, Launch, Results, Tensors, empty, given, normal
from llmbuild.plugins.common.attention_variant import LLAMA_8B, SMOLLM2, AttentionShape
from llmbuild.plugins.rope_kv_write.triton import variant

KINDS = ((LLAMA_8B, "bf16"), (SMOLLM2, "fp16"))  # of activations and pools alike
BLOCKS_OF_A_SEQUENCE = 3
POSITION = 37  # of the token that each sequence brings


def rope_cases(sm: int, batches: Sequence[int]) -> Iterator[Case]:
    for shape, dtype in KINDS:
        for batch in batches:
            yield rope_case(sm, shape, dtype, batch)


def rope_case(sm: int, shape: AttentionShape, dtype: str, batch: int) -> Case:
    """A token of each sequence."""
    of, item, dim = TORCH_TYPES[f"*{dtype}"], TORCH_TYPES[f"*{dtype}"].itemsize, shape.head_dim
    made = variant(shape, dtype, (dtype, dtype), sm, rotary_dim=dim)
    blocks = batch * BLOCKS_OF_A_SEQUENCE
    order = torch.randperm(blocks, generator=torch.Generator().manual_seed(2)) + 1
    pool = (blocks + 1, shape.num_kv_heads, shape.block_size, dim)
    angles = torch.arange(batch)[:, None] + torch.arange(dim // 2) / 7
    buffers = {
        "q": normal(of, batch, shape.num_heads * dim),
        "k": normal(of, batch, shape.num_kv_heads * dim),
        "v": normal(of, batch, shape.num_kv_heads * dim, scale=2.0),
        "table": given(torch.cat((angles.cos(), angles.sin()), dim=1)),
        "positions": given(torch.full((batch,), POSITION, dtype=torch.int32)),
        "query_start": given(torch.arange(batch + 1, dtype=torch.int32)),
        "block_tables": given(order.to(torch.int32).reshape(batch, BLOCKS_OF_A_SEQUENCE)),
        "k_items": normal(of, *pool),
        "v_items": normal(of, *pool),
        "q_out": empty(of, batch, shape.num_heads * dim),
    }
    grid = (-(-batch // int(made.constants["TOKENS"] or 1)), shape.num_heads + shape.num_kv_heads)
    arguments: dict[str, str | int] = {name: name for name in buffers}
    arguments |= {"sequences": batch, "table_blocks": BLOCKS_OF_A_SEQUENCE}
    return Case(
        kernel="rope_kv_write",
        what=f"{dtype} h{shape.num_heads}x{shape.num_kv_heads} d{dim}",
        rows=batch,
        context=0,
        buffers=buffers,
        launches=[Launch(made, grid, arguments)],
        results=("q_out", "k_items", "v_items"),
        moved_bytes=batch * dim * (2 * item * (shape.num_heads + 2 * shape.num_kv_heads) + 4),
        competitor=partial(_write, shape),
    )


def _write(shape: AttentionShape, tensors: Tensors) -> Callable[[], Results]:
    q, k, v = (tensors[name].unflatten(1, (-1, shape.head_dim)) for name in "qkv")
    cosine, sine = tensors["table"].to(q.dtype)[:, None].chunk(2, dim=2)
    block, slot = divmod(POSITION, shape.block_size)
    blocks = tensors["block_tables"][:, block].long()
    pools = tensors["k_items"], tensors["v_items"]

    def turned(x: torch.Tensor) -> torch.Tensor:
        first, second = x.chunk(2, dim=2)
        parts = (first * cosine - second * sine, second * cosine + first * sine)
        return torch.cat(parts, dim=2)

    def write() -> Results:
        for pool, rows in zip(pools, (turned(k), v), strict=True):
            pool[blocks, :, slot] = rows
        return turned(q).flatten(1), *pools

    return write
