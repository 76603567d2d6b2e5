"""paged_attention as two TensorRT plugins, of which the second reads what the first makes."""

from llmbuild.plugins.common.tensorrt_kernels import by_address
from llmbuild.plugins.common.tensorrt_plugin import Launch, Plugin, Shapes, Tactic, make_plugin
from llmbuild.plugins.paged_attention.tensorrt_kernels import decode_by_address, prefill_or_combine
from llmbuild.plugins.paged_attention.triton import (
    MAX_SPLITS,
    AttentionType,
    decode_variant,
    prefill_variant,
)

_SPLIT_TOKENS = 256  # of a context, that are worth a program of their own: a guess


def splits_of(capacity: int) -> int:
    """In how many parts contexts of up to so many tokens are read; a power of two."""
    parts = -(-capacity // _SPLIT_TOKENS)
    return min(1 << (parts - 1).bit_length(), MAX_SPLITS)


def decode(sm: int, of: AttentionType, splits: int) -> Plugin:
    """partial_out and partial_stats of sequences with one token."""
    inner = decode_variant(of, sm)
    variant = by_address(inner, decode_by_address, {"token": "*i32"}, {"SPLITS": splits})
    shape = of.shape

    def launch(shapes: Shapes) -> Launch:
        sequences, table_blocks = shapes["block_tables"]
        return Launch((sequences, shape.num_kv_heads, splits), {"table_blocks": table_blocks})

    def output_shapes(shapes: Shapes) -> Shapes:
        parts = (shapes["block_tables"][0], shape.num_heads, splits)
        return {"partial_out": (*parts, shape.head_dim), "partial_stats": (*parts, 2)}

    return make_plugin(output_shapes, "partial_out partial_stats", Tactic(variant, launch))


def prefill(sm: int, of: AttentionType, splits: int) -> Plugin:
    """out of every sequence."""
    types = {"partial_out": "*fp32", "partial_stats": "*fp32"}
    variant = by_address(prefill_variant(of, sm), prefill_or_combine, types, {"SPLITS": splits})
    tokens = int(variant.constants["ROWS"] or 0) // of.shape.group

    def launch(shapes: Shapes) -> Launch:
        sequences, table_blocks = shapes["block_tables"]
        tiles = shapes["q"][0] // tokens + sequences
        return Launch(
            (tiles, of.shape.num_kv_heads),
            {"sequences": sequences, "table_blocks": table_blocks},
        )

    return make_plugin(lambda shapes: {"out": shapes["q"]}, "out", Tactic(variant, launch))
