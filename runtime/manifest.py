"""Contract two: the engine's manifest, one schema for the builder that writes it and the
runtime that reads it. It alone is enough to plan memory and to call the executable."""

import hashlib
from collections import Counter
from collections.abc import Iterable
from itertools import groupby, pairwise
from pathlib import Path
from typing import Annotated

import msgspec

from llmbuild.errors import EngineError
from llmbuild.runtime.contradictions import (
    pool_contradictions,
    rank_contradictions,
    slot_contradictions,
)
from llmbuild.runtime.record import Bytes, Count, Record
from llmbuild.runtime.target import (
    TARGET_KINDS,
    CpuTarget,
    PlanTensor,
    RtxTarget,
    Target,
    TensorrtTarget,
)

SCHEMA_VERSION = 7
MANIFEST_NAME = "manifest.json"
SCRATCH_BLOCK = 0  # physical block that padding writes to; never given to a sequence

KV_ITEM_BITS = {
    "fp32": 32,
    "bf16": 16,
    "fp16": 16,
    "int8": 8,
    "int8-static": 8,
    "fp8": 8,
    "int4": 4,
}
# Of a token in one head, beside its items: a scale (fp32), or a scale and a minimum (bf16).
KV_SCALE_BYTES = {"int8": 4, "int4": 4}
# Those that a plan keeps in pools of their own, beside that of the items.
_RANGES = {"int8": ("scales",), "int4": ("scales", "minima")}
KV_ALIGNMENT_BYTES = 4  # of a head's part of a block, and of the scales in it
TOKENIZER_FILES = ("tokenizer.json", "generation_config.json")  # every engine has them

_REBUILD = "compile the engine again"

Sha256 = Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{64}$")]


class Limits(Record, frozen=True):
    max_sequence_length: Count  # tokens of one sequence, prompt and output together
    max_step_tokens: Count  # tokens of one step over all sequences
    max_sequences: Count  # sequences of one step


class KVHeads(Record, frozen=True):
    """Neighbouring KV heads that share a K and a V pool."""

    num_heads: Count
    k_dtype: str  # a key of KV_ITEM_BITS
    v_dtype: str


class KVLayer(Record, frozen=True):
    heads: list[KVHeads]  # in order, num_kv_heads in all

    @staticmethod
    def of_heads(dtypes: Iterable[tuple[str, str]]) -> "KVLayer":
        """The layer whose KV heads have these dtypes of K and V, with as few pools as that needs.
        A layer of one kind: of_heads([("int8", "int4")] * num_kv_heads)."""
        runs = ((k, v, len(list(run))) for (k, v), run in groupby(dtypes))
        return KVLayer(heads=[KVHeads(num_heads=n, k_dtype=k, v_dtype=v) for k, v, n in runs])

    @property
    def k_dtypes(self) -> list[str]:
        """K's dtype of each KV head."""
        return [run.k_dtype for run in self.heads for _ in range(run.num_heads)]

    @property
    def v_dtypes(self) -> list[str]:
        """V's dtype of each KV head."""
        return [run.v_dtype for run in self.heads for _ in range(run.num_heads)]

    def describe(self) -> str:
        """K's and V's dtype, such as bf16/int8, or (2 heads int8/int4 + 1 heads bf16/bf16)."""
        if len(self.heads) == 1:
            return f"{self.heads[0].k_dtype}/{self.heads[0].v_dtype}"
        runs = (f"{run.num_heads} heads {run.k_dtype}/{run.v_dtype}" for run in self.heads)
        return f"({' + '.join(runs)})"


class Span(Record, frozen=True):
    first: Bytes
    count: Count

    @property
    def end(self) -> int:
        return self.first + self.count


class KVLayout(Record, frozen=True):
    """Pools lie layer by layer, in a layer run by run, and K's before V's. A pool holds [blocks,
    heads of the run, block_size, head_dim] items; in what order within a head's part of a block is
    the executable's affair. Where a dtype has scales they follow the items of that part; items and
    part are each padded to a multiple of four bytes."""

    block_size: Count
    num_kv_heads: Count
    head_dim: Count
    layers: list[KVLayer]

    @property
    def block_bytes(self) -> int:
        """Bytes of one block over all layers, K and V together."""
        return sum(
            run.num_heads * self.head_block_bytes(dtype)
            for layer in self.layers
            for run in layer.heads
            for dtype in (run.k_dtype, run.v_dtype)
        )

    def part(self, layers: Span, heads: Span) -> "KVLayout":
        """The layout of some layers and KV heads alone."""
        dtypes = [
            list(zip(layer.k_dtypes, layer.v_dtypes, strict=True))[heads.first : heads.end]
            for layer in self.layers[layers.first : layers.end]
        ]
        return KVLayout(
            block_size=self.block_size,
            num_kv_heads=heads.count,
            head_dim=self.head_dim,
            layers=[KVLayer.of_heads(each) for each in dtypes],
        )

    @property
    def pool_bytes(self) -> dict[str, int]:
        """Of tensorrt: bytes of a block in each pool, by the name of the plan's input that has its
        address. A pool holds items, scales or minima, [blocks, heads, block_size, ...]; all heads
        of a layer have one dtype."""
        tokens, sizes = self.num_kv_heads * self.block_size, {}
        for index, layer in enumerate(self.layers):
            (run,) = layer.heads
            for of, dtype in (("k", run.k_dtype), ("v", run.v_dtype)):
                item_bits = tokens * self.head_dim * KV_ITEM_BITS[dtype]
                sizes[pool_name(index, f"{of}_items")] = item_bits // 8
                for part in (parts := _RANGES.get(dtype, ())):
                    each = KV_SCALE_BYTES[dtype] // len(parts)
                    sizes[pool_name(index, f"{of}_{part}")] = tokens * each
        return sizes

    def head_block_bytes(self, dtype: str) -> int:
        """Bytes of one block of one head's K or V."""
        item_bytes = -(-self.block_size * self.head_dim * KV_ITEM_BITS[dtype] // 8)
        padding = -item_bytes % KV_ALIGNMENT_BYTES
        return item_bytes + padding + self.block_size * KV_SCALE_BYTES.get(dtype, 0)


def pool_name(layer: int, tensor: str) -> str:
    """Of a plan's input with an address; tensor: such as "k_items". `layer` counts the rank's own
    from 0."""
    return f"pool.{layer}.{tensor}"


class Parallel(Record, frozen=True):
    """tp ranks share each layer, and pp stages, of tp ranks each, share the layers. Rank
    stage * tp + tp_rank is `ranks`' entry of that index; rank 0 schedules."""

    tp: Count
    pp: Count


class Rank(Record, frozen=True):
    """A shard of the model: each span is of the whole model's. A rank of the first stage has its
    tokens' rows of the embedding, one of the last stage their logits."""

    stage: Bytes
    tp_rank: Bytes
    layers: Span
    heads: Span  # of queries
    kv_heads: Span  # those that the heads read; ranks of a tensor-parallel group may share some
    tokens: Span
    executables: dict[str, str]  # ISA level or compute capability -> path inside the engine
    weights: str  # path inside the engine; a plan holds its own, so that it is the same file
    shared_weights: str | None  # the same, of those that other ranks have as well
    arena_bytes: Bytes  # activations of the largest step; 0 of plans, whose runtime takes them
    plan_tensors: list[PlanTensor] = msgspec.field(
        default_factory=list
    )  # a plan's inputs and outputs


class QuantisedTensor(Record, frozen=True):
    bits: Count
    group_size: Bytes  # columns that share a scale, 0 for a whole row
    symmetric: bool
    zero_points: bool  # whole ones in place of minima, of a grid that isn't symmetric
    activation_group: Bytes  # columns of activations that share one, 0 where none are rounded
    static_activations: bool  # those scales are constants, not found row by row
    is_fp8: bool = False  # weights, and activations that are rounded, are FP8 (E4M3), else integers
    method: str = ""  # that rounded it for its inputs; without, to nearest, or as it was stored

    def describe(self) -> str:
        """In a few words: int4 in groups of 32 with minimum, int8 activations in groups of 32,
        static scales, by gptq; fp8 by row, fp8 activations, static scales."""
        groups = f"in groups of {self.group_size}" if self.group_size else "by row"
        offset = " with zero points" if self.zero_points else " with minimum"
        offset = "" if self.symmetric else offset
        group = self.activation_group
        activations = f"int8 activations in groups of {group}" if group else "unrounded activations"
        if self.is_fp8 and group:  # one scale for all columns
            activations = "fp8 activations"
        activations += ", static scales" if self.static_activations else ""
        activations += f", by {self.method}" if self.method else ""
        return f"{'fp8' if self.is_fp8 else f'int{self.bits}'} {groups}{offset}, {activations}"


class File(Record, frozen=True):
    sha256: Sha256
    size_bytes: Bytes


class Manifest(Record, frozen=True):
    schema_version: int
    llmbuild_version: str
    name: str
    model: dict[str, object]  # the decoder config, as data
    vocab_size: Count
    precision: str  # of matrices that aren't quantised
    quantised: dict[str, QuantisedTensor]  # by canonical name
    target: Target
    limits: Limits
    buckets: list[Count]  # decode batch sizes compiled ahead of time, ascending
    kv: KVLayout
    parallel: Parallel
    ranks: list[Rank]  # stage by stage
    files: dict[str, File]  # every file of the engine but the manifest, by relative path
    rotated: bool = False  # the model is in rotated coordinates
    distilled: bool = False  # quantised matrices were trained together
    digest: str = ""  # sha256 of the manifest's encoding while this is empty; `seal` fills it in

    def kv_of(self, rank: Rank) -> KVLayout:
        """What a rank holds of the KV cache."""
        return self.kv.part(rank.layers, rank.kv_heads)

    @property
    def kv_block_bytes(self) -> int:
        """Bytes of one block on all ranks together."""
        return sum(self.kv_of(rank).block_bytes for rank in self.ranks)

    def step_shape_of(self, rank: Rank) -> str:
        """step_shape of a rank's executable."""
        num_logits = rank.tokens.count if rank.stage == self.parallel.pp - 1 else 0
        kv, arena_bytes = self.kv_of(rank), rank.arena_bytes
        return step_shape(self.limits, kv, num_logits, arena_bytes, rank.stage, self.parallel)

    @property
    def quantised_kinds(self) -> dict[str, int]:
        """How many tensors are quantised how, in words."""
        return dict(Counter(tensor.describe() for tensor in self.quantised.values()))


ALONE = Parallel(tp=1, pp=1)


def step_shape(
    limits: Limits,
    kv: KVLayout,
    num_logits: int,
    arena_bytes: int,
    stage: int = 0,
    parallel: Parallel = ALONE,
) -> str:
    """All that a caller of an executable has to know of its steps, in one line. An executable
    carries the line that it was compiled for, and runs under no manifest with another."""
    kinds = groupby(layer.describe() for layer in kv.layers)
    runs = [f"{len(list(run))} layers {kind}" for kind, run in kinds]
    return (
        f"steps of {limits.max_step_tokens} tokens, {limits.max_sequences} sequences of "
        f"{limits.max_sequence_length}, {num_logits} logits, {arena_bytes} bytes of activations; "
        f"KV blocks of {kv.block_size} tokens, {kv.num_kv_heads} heads of {kv.head_dim}, "
        f"{', '.join(runs)}; stage {stage} of {parallel.pp}, {parallel.tp} ranks each"
    )


def encode(manifest: Manifest) -> bytes:
    """The manifest as indented JSON, keys in the schema's order."""
    return msgspec.json.format(msgspec.json.encode(manifest), indent=2) + b"\n"


def seal(manifest: Manifest) -> Manifest:
    """The manifest with its digest, by which the runtime knows that it is as it was written."""
    blank = msgspec.structs.replace(manifest, digest="")
    return msgspec.structs.replace(blank, digest=hashlib.sha256(encode(blank)).hexdigest())


def read_manifest(root: Path) -> Manifest:
    """The manifest of the engine directory `root`.

    Refuses, with an EngineError, one that is missing, of another schema version, malformed,
    altered since it was sealed, or at odds with itself. A same schema version suffices: the
    llmbuild version that wrote it is recorded and may differ from the one that reads it.
    """
    path = root / MANIFEST_NAME
    raw = _read(root)
    try:
        content = msgspec.json.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise EngineError(f"{path} isn't JSON: {error}; {_REBUILD}") from error
    version = content.get("schema_version") if isinstance(content, dict) else None
    if type(version) is not int or version != SCHEMA_VERSION:
        given = f"schema version {version!r}" if version is not None else "no schema version"
        raise EngineError(
            f"{path} has {given}, and this runtime reads {SCHEMA_VERSION}; compile the model with "
            "this llmbuild, or run the engine with the one that compiled it"
        )
    _check_target(content)
    try:
        manifest = msgspec.json.decode(raw, type=Manifest)
    except msgspec.ValidationError as error:
        raise EngineError(f"{path} doesn't follow the schema: {error}; {_REBUILD}") from error
    blank = raw.replace(f'"digest": "{manifest.digest}"'.encode(), b'"digest": ""')
    digest = hashlib.sha256(blank).hexdigest()
    if digest != manifest.digest:
        raise EngineError(
            f"{path} was altered after it was written: it carries digest {manifest.digest!r}, and "
            f"its contents have {digest!r}; {_REBUILD}"
        )
    faults = _contradictions(manifest)
    if faults:
        raise EngineError(f"{path} contradicts itself: {'; '.join(faults)}; {_REBUILD}")
    return manifest


def _check_target(content: dict[str, object]) -> None:
    target = content.get("target")
    kind = target.get("kind") if isinstance(target, dict) else None
    if isinstance(kind, str) and kind not in TARGET_KINDS:
        raise EngineError(
            f"the engine is for target {kind!r}, and this runtime runs "
            f"{', '.join(map(repr, TARGET_KINDS))}; compile the model for one of these"
        )


def _read(root: Path) -> bytes:
    advice = "give the engine directory that `llmbuild compile` published"
    try:
        if not root.is_dir():
            what = "isn't a directory" if root.exists() else "doesn't exist"
            raise EngineError(f"{root} {what}; {advice}")
        if not (root / MANIFEST_NAME).is_file():
            raise EngineError(f"{root} isn't an engine, it has no {MANIFEST_NAME}; {advice}")
        return (root / MANIFEST_NAME).read_bytes()
    except OSError as error:
        raise EngineError(f"can't read {error.filename}: {error.strerror}") from error


def _contradictions(manifest: Manifest) -> list[str]:
    """What doesn't fit together in a well-formed manifest, both values named."""
    kv, model, target = manifest.kv, manifest.model, manifest.target
    same: list[tuple[str, object, str, object]] = [
        ("model.num_layers", model.get("num_layers"), "KV layers", len(kv.layers)),
        ("model.num_kv_heads", model.get("num_kv_heads"), "kv.num_kv_heads", kv.num_kv_heads),
        ("model.head_dim", model.get("head_dim"), "kv.head_dim", kv.head_dim),
        ("model.vocab_size", model.get("vocab_size"), "vocab_size", manifest.vocab_size),
    ]
    key = target.variants_key
    variants = (f"target.{key}", sorted(target.variants))
    if isinstance(target, CpuTarget):
        same.append(
            ("the levels of target.compiler_flags", sorted(target.compiler_flags), *variants)
        )
    for index, rank in enumerate(manifest.ranks):
        same.append((f"the executables of rank {index}", sorted(rank.executables), *variants))
    faults = [f"{a} {x!r}, but {b} {y!r}" for a, x, b, y in same if x != y]
    faults += rank_contradictions(manifest)

    runs = [run for layer in kv.layers for run in layer.heads]
    dtypes = {dtype for run in runs for dtype in (run.k_dtype, run.v_dtype)}
    known = ", ".join(KV_ITEM_BITS)
    faults += [f"KV dtype {d!r}, but known are {known}" for d in sorted(dtypes - {*KV_ITEM_BITS})]
    faults += [
        f"KV layer {index} has {heads} heads, but kv.num_kv_heads is {kv.num_kv_heads}"
        for index, heads in enumerate(sum(r.num_heads for r in layer.heads) for layer in kv.layers)
        if heads != kv.num_kv_heads
    ]
    if isinstance(target, RtxTarget):
        faults += slot_contradictions(manifest)
    if isinstance(target, TensorrtTarget) and not faults:  # whose names follow from a sound layout
        faults += pool_contradictions(manifest)
    if not manifest.ranks or not target.variants:
        faults.append(f"{len(manifest.ranks)} ranks and {key} {variants}")
    if not kv.layers:
        faults.append("no KV layers")
    limits = manifest.limits
    most = min(limits.max_sequences, limits.max_step_tokens)
    faults += [
        f"a bucket of {bucket}, but a step has at most {most} sequences"
        for bucket in manifest.buckets
        if bucket > most
    ]
    if any(b <= a for a, b in pairwise(manifest.buckets)):
        faults.append(f"buckets {manifest.buckets} don't ascend")

    needed = {*TOKENIZER_FILES}
    for rank in manifest.ranks:
        needed |= {rank.weights, *rank.executables.values()}
        needed |= set() if rank.shared_weights is None else {rank.shared_weights}
    faults += [f"files lacks {name!r}" for name in sorted(needed - {*manifest.files})]
    if MANIFEST_NAME in manifest.files:
        faults.append(f"files lists {MANIFEST_NAME} itself")
    return faults
