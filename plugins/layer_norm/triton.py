"""layer_norm on GPUs, a row a program."""

from collections.abc import Iterator

import triton
import triton.language as tl

from llmbuild.plugins.common.kernel_variant import KernelVariant
from llmbuild.plugins.common.kv_triton import narrowed
from llmbuild.plugins.common.make_variant import for_row_of, make_variant
from llmbuild.plugins.common.model_shape import LLAMA_8B
from llmbuild.plugins.common.row_groups_triton import group_columns, load_columns
from llmbuild.plugins.common.tuning import tuned


@triton.jit
def layer_norm(
    x,  # [T, N]
    weight,  # fp32 [N]
    bias,  # fp32 [N] or None
    y,  # as x
    N: tl.constexpr,
    EPS: tl.constexpr,
):
    """Grid: (T,)."""
    _, columns, exists = group_columns(0, N, N, 1)
    start = tl.program_id(0).to(tl.int64) * N
    values = load_columns(x + start, columns, exists)
    mean = tl.sum(values, axis=1, keep_dims=True) * (1.0 / N)
    values = tl.where(exists, values - mean, 0.0)
    variance = tl.sum(values * values, axis=1, keep_dims=True) * (1.0 / N)
    values = values * tl.rsqrt(variance + EPS) * load_columns(weight, columns, exists)
    if bias is not None:
        values += load_columns(bias, columns, exists)
    tl.store(y + start + columns, narrowed(values, y.dtype.element_ty), exists)


def variants(sm: int) -> Iterator[KernelVariant]:
    for has_bias in (True, False):
        yield layer_norm_variant(sm, "bf16", LLAMA_8B.hidden, has_bias)


def layer_norm_variant(
    sm: int, activation: str, width: int, has_bias: bool, eps: float = 1e-5
) -> KernelVariant:
    pointer = f"*{activation}"
    types = {"x": pointer, "weight": "*fp32", "bias": "*fp32" if has_bias else None, "y": pointer}
    return make_variant(
        f"layer_norm.{activation}.n{width}" + (".bias" if has_bias else ""),
        layer_norm,
        types,
        {"N": width, "EPS": eps},
        for_row_of(width, tuned("layer_norm", sm)),
        bytes_per_token=4 * width,
    )
