"""Every CPU kernel on a model's shapes: what is called, and the work that it has to do."""

from collections.abc import Iterator
from dataclasses import dataclass

from bench.roofline import Work
from bench.step_work import model_size
from llmbuild.builder.targets.cpu.head_runs import KV_CPP_TYPES
from llmbuild.builder.targets.cpu.lowering import ATTENTION_RANGE_KEYS
from llmbuild.builder.targets.cpu.pack_quantised import quantised_bytes
from llmbuild.quant.grid import WeightGrid
from llmbuild.quant.plan import activation_group
from llmbuild.runtime.manifest import KV_ITEM_BITS, KV_SCALE_BYTES, KVLayout, Manifest

ITEM_BYTES = {"float": 4, "bf16": 2}
GRIDS = (
    WeightGrid(4, 32, symmetric=False),
    WeightGrid(4, 64, symmetric=True),
    WeightGrid(8, 0, symmetric=True),
    WeightGrid(8, 32, symmetric=True),
)
ACTIVATION_GROUP = 64  # columns of int8 activations that share a scale, where no weight has a say
LINEAR_ROWS = (1, 2, 4, 8, 32, 128, 512)
HEAD_ROWS = (1, 2, 4, 8, 32)  # of lm_head: one a sequence
ROWS = (1, 32, 512)
CONTEXTS = (128, 2048)
EXPERTS, TOP_K = 8, 2  # kExperts and kTopK of kernels.cpp


@dataclass(frozen=True)
class Shape:
    """The sizes of a decoder that kernels depend on."""

    name: str
    hidden: int
    inner: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    layers: int
    block_size: int = 16

    @property
    def q(self) -> int:
        return self.heads * self.head_dim

    @property
    def kv(self) -> int:
        return self.kv_heads * self.head_dim

    @property
    def qkv(self) -> int:
        return self.q + 2 * self.kv


SHAPES = {
    shape.name: shape
    for shape in (
        Shape("smollm2-135m", 576, 1536, 9, 3, 64, 49152, 30),
        Shape("llama-1.1b", 2048, 5632, 32, 4, 64, 32000, 22),
    )
}


def shape_of(manifest: Manifest) -> Shape:
    """The shape of an engine's model."""
    return Shape(
        name=manifest.name,
        hidden=model_size(manifest, "hidden_size"),
        inner=model_size(manifest, "intermediate_size"),
        heads=model_size(manifest, "num_heads"),
        kv_heads=manifest.kv.num_kv_heads,
        head_dim=manifest.kv.head_dim,
        vocab=manifest.vocab_size,
        layers=model_size(manifest, "num_layers"),
        block_size=manifest.kv.block_size,
    )


@dataclass(frozen=True)
class KVDtype:
    """A dtype of KV pools by the manifest's name."""

    name: str

    @property
    def item_bytes(self) -> int:
        """Of the kernels' type; two codes of int4 are one item."""
        return -(-KV_ITEM_BITS[self.name] // 8)

    def head_bytes(self, s: Shape) -> int:
        """Of one token's K or V in one head."""
        return s.head_dim * KV_ITEM_BITS[self.name] // 8 + KV_SCALE_BYTES.get(self.name, 0)


KV_DTYPES = {cpp_type: KVDtype(name) for name, cpp_type in KV_CPP_TYPES.items()}


@dataclass(frozen=True)
class Batch:
    """Equal sequences of `context` tokens after a step that adds `new_tokens` to each."""

    sequences: int
    new_tokens: int
    context: int

    @property
    def rows(self) -> int:
        return self.sequences * self.new_tokens

    @property
    def keys(self) -> int:
        """Keys that the step's tokens see, added up."""
        unseen = self.new_tokens * (self.new_tokens - 1) // 2
        return self.sequences * (self.new_tokens * self.context - unseen)


def batch_of(rows: int) -> Batch:
    """Decoding of up to 32 sequences, or else the prefill of one."""
    return Batch(rows, 1, 128) if rows <= 32 else Batch(1, rows, rows)


@dataclass(frozen=True)
class Case:
    """One kernel on one batch. code: the call, from fields of Data (kernels.cpp).

    touched_bytes: from the start of its cold memory to the end of what it may read, where that is
    more than the work's cold bytes.
    """

    kernel: str
    what: str
    batch: Batch
    code: str
    work: Work
    touched_bytes: int = 0

    @property
    def copy_bytes(self) -> int:
        """Size of the cold memory, of which each call gets another copy."""
        return max(self.touched_bytes, self.work.cold_bytes)


def cases(shape: Shape) -> Iterator[Case]:
    """All of them, kernel by kernel."""
    for dtype in ITEM_BYTES:
        yield from _linears(shape, dtype)
    for grid in GRIDS:
        yield from _int8_linears(shape, grid)
    for dtype in KV_DTYPES:
        yield from _attention(shape, dtype)
    for rows in ROWS:
        batch = batch_of(rows)
        yield from _norms(shape, batch)
        if rows <= HEAD_ROWS[-1]:
            yield _best(shape, batch)
        yield from _rope(shape, batch)
        yield from _pointwise(shape, batch)
        yield from _gathers(shape, batch)
        yield from _quantised(shape, batch)
        yield from _moe(shape, batch)


def _linear_shapes(s: Shape) -> Iterator[tuple[str, int, int, tuple[int, ...]]]:
    """Name, outputs, inputs, numbers of rows."""
    yield "qkv", s.qkv, s.hidden, LINEAR_ROWS
    yield "o", s.hidden, s.q, LINEAR_ROWS
    yield "gate_up", 2 * s.inner, s.hidden, LINEAR_ROWS
    yield "down", s.hidden, s.inner, LINEAR_ROWS
    yield "lm_head", s.vocab, s.hidden, HEAD_ROWS


def _linears(s: Shape, dtype: str) -> Iterator[Case]:
    for name, n, k, row_counts in _linear_shapes(s):
        arguments = f"worker, d.a, d.at<{dtype}>(), nullptr, d.b, d.rows"
        code = f"linear<{dtype}, {n}, {k}, {k}, {n}>({arguments})"
        padded = -(-n // 16) * 16
        for rows in row_counts:
            work = Work(padded * k * ITEM_BYTES[dtype], 4 * rows * (n + k), 2 * rows * n * k)
            yield Case("linear", f"{name} {n}x{k} {dtype}", batch_of(rows), code, work)


def _int8_linears(s: Shape, grid: WeightGrid) -> Iterator[Case]:
    for name, n, k, row_counts in _linear_shapes(s):
        group = activation_group(grid, k)
        shape = f"{_template(grid, k)}, {n}, {k}, {group}, {n}"
        x = "reinterpret_cast<const uint8_t*>(d.a)"
        code = f"int8_linear<{shape}>(worker, {x}, d.cold, nullptr, d.b, d.rows)"
        for rows in row_counts:
            warm = rows * (_int8_row_bytes(k, group) + 4 * n)
            work = Work(quantised_bytes(grid, n, k), warm, int8_operations=2 * rows * n * k)
            what = f"{name} {n}x{k} {grid.describe()}"
            yield Case("int8_linear", what, batch_of(rows), code, work)


def _template(grid: WeightGrid, k: int) -> str:
    """The grid as C++ for rows of k columns."""
    return f"Grid<{grid.bits}, {grid.columns_of(k)}, {'false' if grid.symmetric else 'true'}>"


def _int8_row_bytes(k: int, group: int = ACTIVATION_GROUP) -> int:
    """Codes, scales and two sums for each 32 of them; padding isn't counted."""
    return k + 4 * k // group + 8 * k // 32


def _attention(s: Shape, dtype: str) -> Iterator[Case]:
    heads = f"{dtype}, {dtype}, {s.heads}, {s.kv_heads}, {s.head_dim}, {s.block_size}"
    for context in CONTEXTS:
        for name, batch in (
            ("decode", Batch(1, 1, context)),
            ("decode", Batch(32, 1, context)),
            ("prefill", Batch(1, min(context, 512), context)),
        ):
            pool_bytes = _pool_bytes(s, batch, dtype)
            parts = -(-context // ATTENTION_RANGE_KEYS) * s.heads * (-(-s.head_dim // 16) * 16 + 2)
            code = (
                f"paged_attention<{heads}, {s.q}, {s.q}>(worker, d.step, d.a, d.at<{dtype}>(), "
                f"d.at<{dtype}>({pool_bytes // KV_DTYPES[dtype].item_bytes}), 0.125f, 0, d.b, 0, "
                f"nullptr, d.c, {parts})"
            )
            cold = 2 * batch.sequences * context * s.kv_heads * KV_DTYPES[dtype].head_bytes(s)
            work = Work(cold, 8 * batch.rows * s.q, 4 * batch.keys * s.q)
            what = f"{name} at {context} {dtype}"
            yield Case("paged_attention", what, batch, code, work, 2 * pool_bytes)


def _pool_bytes(s: Shape, batch: Batch, dtype: str) -> int:
    """One layer's K, or its V."""
    layout = KVLayout(
        block_size=s.block_size, num_kv_heads=s.kv_heads, head_dim=s.head_dim, layers=[]
    )
    blocks = batch.sequences * -(-batch.context // s.block_size)
    return blocks * s.kv_heads * layout.head_block_bytes(KV_DTYPES[dtype].name)


def _norms(s: Shape, batch: Batch) -> Iterator[Case]:
    n, r = s.hidden, batch.rows
    rms = f"rms_norm<{n}, {n}, {n}, {n}>(worker, d.a, d.d, 1e-5f, d.b, d.rows)"
    yield Case("rms_norm", f"{n}", batch, rms, Work(0, 8 * r * n + 4 * n, 4 * r * n))
    add = f"add_rms_norm<{n}, {n}, {n}, {n}, {n}>(worker, d.a, d.b, d.d, 1e-5f, d.b, d.c, d.rows)"
    yield Case("add_rms_norm", f"{n}", batch, add, Work(0, 16 * r * n + 4 * n, 5 * r * n))
    group, as_bytes = ACTIVATION_GROUP, "reinterpret_cast<uint8_t*>(d.c)"
    row_bytes = _int8_row_bytes(n)
    rms = f"rms_norm_int8<{n}, {group}, {n}>(worker, d.a, d.d, 1e-5f, {as_bytes}, d.rows)"
    work = Work(0, r * (4 * n + row_bytes) + 4 * n, 8 * r * n)
    yield Case("rms_norm_int8", f"{n}", batch, rms, work)
    add = (
        f"add_rms_norm_int8<{n}, {n}, {n}, {n}, {group}>"
        f"(worker, d.a, d.b, d.d, 1e-5f, d.b, {as_bytes}, d.rows)"
    )
    work = Work(0, r * (12 * n + row_bytes) + 4 * n, 9 * r * n)
    yield Case("add_rms_norm_int8", f"{n}", batch, add, work)
    layer = f"layer_norm<{n}, {n}, {n}>(worker, d.a, d.d, d.d, 1e-5f, d.b, d.rows)"
    yield Case("layer_norm", f"{n}", batch, layer, Work(0, 8 * r * n + 4 * n, 7 * r * n))


def _rope(s: Shape, batch: Batch) -> Iterator[Case]:
    r, half = batch.rows, s.head_dim // 2
    what, work = f"{s.head_dim}", Work(0, 4 * r * s.head_dim + 4 * half, 5 * r * half)
    table = f"rope_table<{half}>(worker, d.step.positions, d.a, 1.0f, d.b, d.rows)"
    yield Case("rope_table", what, batch, table, work)
    switched = f"switched_rope_table<{half}>(worker, d.step, d.a, 64, 1.0f, d.b)"
    yield Case("switched_rope_table", what, batch, switched, work)
    dynamic = f"dynamic_rope_table<{half}>(worker, d.step, 1e4f, 2.0f, 64, 1.0f, d.b)"
    yield Case("dynamic_rope_table", what, batch, dynamic, work)
    for dtype, kv in KV_DTYPES.items():
        pool_bytes = _pool_bytes(s, batch, dtype)
        write = (
            f"rope_kv_write<{dtype}, {dtype}, {s.heads}, {s.kv_heads}, {s.head_dim}, "
            f"{s.block_size}, {s.qkv}, {s.qkv}, {s.qkv}, {s.q}, false>"
            f"(worker, d.step, d.a, d.a + {s.q}, d.a + {s.q + s.kv}, d.b, nullptr, nullptr, 0.0f, "
            f"d.at<{dtype}>(), d.at<{dtype}>({pool_bytes // kv.item_bytes}), d.c)"
        )
        warm = 4 * r * (s.qkv + s.q + s.head_dim)
        work = Work(2 * r * s.kv_heads * kv.head_bytes(s), warm, 3 * r * (s.q + s.kv))
        what = f"{s.heads}/{s.kv_heads} {dtype}"
        yield Case("rope_kv_write", what, batch, write, work, 2 * pool_bytes)


def _pointwise(s: Shape, batch: Batch) -> Iterator[Case]:
    n, r = s.inner, batch.rows
    gated = (
        f"gated_activation<{n}, {2 * n}, {2 * n}, {n}, Silu>(worker, d.a, d.a + {n}, d.b, d.rows)"
    )
    yield Case("gated_activation", f"{n}", batch, gated, Work(0, 12 * r * n, 5 * r * n))
    int8 = (
        f"gated_activation_int8<{n}, {2 * n}, {2 * n}, {ACTIVATION_GROUP}, Silu>"
        f"(worker, d.a, d.a + {n}, reinterpret_cast<uint8_t*>(d.b), d.rows)"
    )
    work = Work(0, r * (8 * n + _int8_row_bytes(n)), 9 * r * n)
    yield Case("gated_activation_int8", f"{n}", batch, int8, work)
    n = s.hidden
    add = (
        f"elementwise<{n}, {n}>(worker, d.c, d.rows, [&](int64_t r, int i) {{ "
        f"return load_chunk<{n}>(d.a + r * {n}, i) + load_chunk<{n}>(d.b + r * {n}, i); }})"
    )
    yield Case("elementwise", f"a + b {n}", batch, add, Work(0, 12 * r * n, r * n))


_EVERY_ROW = "OwnRows{0, 1 << 30}"  # of the table, as of any rank alone


def _gathers(s: Shape, batch: Batch) -> Iterator[Case]:
    n, r = s.hidden, batch.rows
    work = Work(2 * r * n, 4 * r * n)
    for kernel, index, touched_bytes in (
        ("gather_rows", "row_index", 2 * r * n),
        ("gather_tiled_rows", "tile_index", 2 * r * n * 16),
    ):
        arguments = f"d.at<bf16>(), {_EVERY_ROW}, d.{index}, d.a, d.rows"
        code = f"{kernel}<bf16, {n}, {n}>(worker, {arguments})"
        yield Case(kernel, f"{n} bf16", batch, code, work, touched_bytes)


def _quantised(s: Shape, batch: Batch) -> Iterator[Case]:
    """What goes with quantised linears: the way into int8, fp32 activations, embeddings."""
    r = batch.rows
    for k in (s.hidden, s.inner):
        y = "reinterpret_cast<uint8_t*>(d.b)"
        code = f"quantise_rows<{k}, {ACTIVATION_GROUP}, {k}>(worker, d.a, {y}, d.rows)"
        work = Work(0, r * (4 * k + _int8_row_bytes(k)), 4 * r * k)
        yield Case("quantise_rows", f"{k}", batch, code, work)
    grid, n, k = GRIDS[0], 2 * s.inner, s.hidden
    table = _template(grid, k)
    shape = f"{table}, {n}, {k}, {k}, {n}"
    code = f"dequantised_linear<{shape}>(worker, d.a, d.cold, nullptr, d.b, d.rows)"
    work = Work(quantised_bytes(grid, n, k), 4 * r * (n + k), 2 * r * n * k)
    yield Case("dequantised_linear", f"gate_up {n}x{k} {grid.describe()}", batch, code, work)
    arguments = f"d.cold, {_EVERY_ROW}, d.tile_index, d.a, d.rows"
    gather = f"gather_quantised_rows<{table}, {k}, {k}>(worker, {arguments})"
    tile_bytes = quantised_bytes(grid, 16, k)
    work = Work(r * tile_bytes // 16, 4 * r * k)
    what = f"{k} {grid.describe()}"
    yield Case("gather_quantised_rows", what, batch, gather, work, r * tile_bytes)


def _best(s: Shape, batch: Batch) -> Case:
    code = f"best_of_columns<{s.vocab}>(worker, d.a, reinterpret_cast<Best*>(d.c), d.rows)"
    items = batch.rows * s.vocab
    return Case("best_of_columns", f"{s.vocab}", batch, code, Work(0, 4 * items, items))


def _moe(s: Shape, batch: Batch) -> Iterator[Case]:
    """Experts of a quarter of the MLP's width; routing is even."""
    r, e, k, h = batch.rows, EXPERTS, TOP_K, s.hidden
    slots, n = k * r, s.inner // 2  # n: an expert's gate and up together
    what = f"{k} of {e}"
    route = f"moe_route<{e}, {k}, Softmax, true, {e}>(worker, d.a, d.experts, d.c, d.rows)"
    work = Work(0, 4 * r * e + 8 * slots, 4 * r * e + 2 * slots)
    yield Case("moe_route", what, batch, route, work)
    sort = f"moe_sort<{e}, {k}>(worker, d.experts, d.starts, d.rows_of, d.slot_of, d.rows)"
    yield Case("moe_sort", what, batch, sort, Work(0, 12 * slots + 4 * (e + 1)))
    gather = f"moe_gather<{h}, {h}>(worker, d.a, d.rows_of, d.b, d.slots)"
    yield Case("moe_gather", f"{h}", batch, gather, Work(0, 4 * (r + slots) * h))
    linear = f"moe_linear<bf16, {e}, {n}, {h}>(worker, d.a, d.at<bf16>(), d.starts, d.b)"
    expert_bytes = 2 * -(-n // 16) * 16 * h
    work = Work(min(e, slots) * expert_bytes, 4 * slots * (n + h), 2 * slots * n * h)
    yield Case("moe_linear", f"{n}x{h} {what} bf16", batch, linear, work, e * expert_bytes)
    yield from _quantised_experts(n, h, batch)
    combine = f"moe_combine<{h}, {k}, {h}>(worker, d.a, d.slot_of, d.c, d.b, d.rows)"
    warm = 4 * (slots + r) * h + 8 * slots
    yield Case("moe_combine", f"{h}", batch, combine, Work(0, warm, 2 * slots * h))


def _quantised_experts(n: int, h: int, batch: Batch) -> Iterator[Case]:
    """Linears of EXPERTS experts with fp32 activations, and with int8 ones."""
    slots, x = TOP_K * batch.rows, "reinterpret_cast<const uint8_t*>(d.a)"
    for grid in GRIDS:
        what = f"{n}x{h} {TOP_K} of {EXPERTS} {grid.describe()}"
        shape, group = f"{_template(grid, h)}, {EXPERTS}, {n}, {h}", activation_group(grid, h)
        expert_bytes, operations = quantised_bytes(grid, n, h), 2 * slots * n * h
        cold_bytes = min(EXPERTS, slots) * expert_bytes
        code = f"moe_dequantised_linear<{shape}>(worker, d.a, d.cold, d.starts, d.b)"
        work = Work(cold_bytes, 4 * slots * (n + h), operations)
        yield Case("moe_dequantised_linear", what, batch, code, work, EXPERTS * expert_bytes)
        code = f"moe_int8_linear<{shape}, {group}>(worker, {x}, d.cold, d.starts, d.b)"
        warm_bytes = slots * (_int8_row_bytes(h, group) + 4 * n)
        work = Work(cold_bytes, warm_bytes, int8_operations=operations)
        yield Case("moe_int8_linear", what, batch, code, work, EXPERTS * expert_bytes)
