"""rope_kv_write as a TensorRT plugin."""

from llmbuild.plugins.common.attention_variant import AttentionShape
from llmbuild.plugins.common.tensorrt_kernels import by_address
from llmbuild.plugins.common.tensorrt_plugin import (
    Launch,
    Plugin,
    Shapes,
    Tactic,
    ceil_div,
    make_plugin,
)
from llmbuild.plugins.rope_kv_write.tensorrt_kernels import rope_kv_write_by_address
from llmbuild.plugins.rope_kv_write.triton import variant as inner_variant


def rope_kv_write(
    sm: int,
    shape: AttentionShape,
    activation: str,
    kv_dtypes: tuple[str, str],
    *,
    rotary_dim: int | None = None,
    eps: float | None = None,
    has_channel_scales: bool = False,
) -> Plugin:
    """q_out and token of the kernel's other tensors; the pools' are given by their addresses.
    rotary_dim: elements of a head that turn, None for none. eps: of QK-norm, None without."""
    inner = inner_variant(
        shape,
        activation,
        kv_dtypes,
        sm,
        rotary_dim=rotary_dim,
        eps=eps,
        has_channel_scales=has_channel_scales,
    )
    variant = by_address(inner, rope_kv_write_by_address, {"token": "*i32"}, {})
    tokens = int(variant.constants["TOKENS"] or 0)

    def launch(shapes: Shapes) -> Launch:
        sequences, table_blocks = shapes["block_tables"]
        return Launch(
            (ceil_div(shapes["q"][0], tokens), shape.num_heads + shape.num_kv_heads),
            {"sequences": sequences, "table_blocks": table_blocks},
        )

    return make_plugin(
        lambda shapes: {"q_out": shapes["q"], "token": (1,)},
        "q_out token",
        Tactic(variant, launch),
    )
