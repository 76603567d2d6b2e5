"""gather_rows on GPUs: rows of a table by index, also of a table on a grid."""

from collections.abc import Iterator

import triton
import triton.language as tl

from llmbuild.plugins.common.kernel_variant import KernelVariant
from llmbuild.plugins.common.kv_triton import narrowed
from llmbuild.plugins.common.make_variant import make_variant
from llmbuild.plugins.common.tuning import tuned
from llmbuild.plugins.common.weight_format import Q4_0, Q4_1, Q8_0, WeightFormat
from llmbuild.plugins.common.weight_triton import load_scales, scale_places, weight_numbers

# Tables are quantised where a checkpoint has them so: GGUF's Q4_0, Q4_1 and Q8_0.
_STORED = (Q4_0, Q4_1, Q8_0)


@triton.jit
def gather_rows(
    table,  # [rows, N], rows FIRST and on of a larger one
    index,  # int32 [R]
    rows,
    N,
    y,  # [R, N], zeros for a row that the table hasn't
    FIRST: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Grid: (R, ceil(N / COLUMNS))."""
    place, width = place_of(index, rows, N, FIRST)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    values = tl.load(table + place * N + columns, columns < width, other=0.0).to(tl.float32)
    row = y + tl.program_id(0).to(tl.int64) * N
    tl.store(row + columns, narrowed(values, y.dtype.element_ty), columns < N)


@triton.jit
def gather_quantised_rows(
    codes,  # of [rows, N], rows FIRST and on of a larger one (plugins/common/weight_triton.py)
    scales,  # fp16 [rows, groups]
    minima,  # fp16 [rows, groups] or None
    zeros,  # int8 [rows, groups] or None
    index,  # int32 [R]
    rows,
    N,
    y,  # [R, N], zeros for a row that the table hasn't
    FIRST: tl.constexpr,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Grid: (R, ceil(N / COLUMNS))."""
    place, width = place_of(index, rows, N, FIRST)
    BYTES: tl.constexpr = COLUMNS * BITS // 8
    at = tl.program_id(1) * BYTES + tl.arange(0, BYTES)
    values = tl.load(codes + place * (N * BITS // 8) + at, at < width * BITS // 8, other=0)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    places = scale_places(place, columns, N, GROUP)
    scale, offset = load_scales(scales, minima, zeros, places, columns < width, BITS)
    numbers = weight_numbers(values, BITS, tl.float32) * scale + offset
    row = y + tl.program_id(0).to(tl.int64) * N
    tl.store(row + columns, narrowed(numbers, y.dtype.element_ty), columns < N)


@triton.jit
def place_of(index, rows, N, FIRST: tl.constexpr):
    """Where this program's row lies in the table, and how many columns it has there, N or 0."""
    place = tl.load(index + tl.program_id(0)).to(tl.int64) - FIRST
    return place, tl.where((place >= 0) & (place < rows), N, 0)


def variants(sm: int) -> Iterator[KernelVariant]:
    for activation in ("fp16", "bf16"):
        for table in (activation, "fp32"):
            yield gather_variant(sm, table, activation)
    for weights in _STORED:
        yield quantised_gather_variant(sm, weights, "bf16")


def gather_variant(sm: int, table: str, activation: str, first: int = 0) -> KernelVariant:
    tiles = tuned("gather_rows", sm)
    types = {
        "table": f"*{table}",
        "index": "*i32",
        "rows": "i32",
        "N": "i32",
        "y": f"*{activation}",
    }
    return make_variant(
        f"gather_rows.{activation}.{table}" + (f".first{first}" if first else ""),
        gather_rows,
        types,
        {"FIRST": first, "COLUMNS": tiles.columns},
        tiles,
        bytes_per_token="6 * N" if table == "fp32" else "4 * N",
        multiples_of_16=("N",),
    )


def quantised_gather_variant(
    sm: int, weights: WeightFormat, activation: str, first: int = 0
) -> KernelVariant:
    tiles = tuned("gather_rows", sm)
    types = weights.types(sm) | {
        "index": "*i32",
        "rows": "i32",
        "N": "i32",
        "y": f"*{activation}",
    }
    return make_variant(
        f"gather_quantised_rows.{activation}.{weights.name}" + (f".first{first}" if first else ""),
        gather_quantised_rows,
        types,
        weights.constants | {"FIRST": first, "COLUMNS": tiles.columns},
        tiles,
        bytes_per_token=f"2 * N + {weights.bytes_of('N')}",
        multiples_of_16=("N",),
    )
