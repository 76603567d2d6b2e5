"""`llmbuild inspect`: what an engine is, what it needs, and what a token costs it."""

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import click
import msgspec

from llmbuild.errors import EngineError
from llmbuild.runtime.engine import check_files, check_plans, check_servable, choose_variant
from llmbuild.runtime.manifest import KVLayer, Manifest, Rank, Span, read_manifest
from llmbuild.runtime.plan_header import read_plan_header
from llmbuild.runtime.target import CpuTarget, PlanTensor, RtxTarget
from llmbuild.runtime.vocab_matrices import embedding_bytes, has_own_head

Row = tuple[str, str]

_LAYER = re.compile(r"\.(\d+)\.")


@dataclass(frozen=True)
class Derived:
    """What follows from a manifest, here and at a number of tokens of context."""

    runs_here: bool
    variant: str | None  # of the executables, that runs here
    refusal: str | None  # why it doesn't
    weights_bytes: int
    arena_bytes: int
    total_bytes: int  # of all files but the manifest
    kv_bytes_per_token: int
    kv_bytes_per_block: int
    context_tokens: int
    decode_bytes_per_token: int  # what a decoded token reads at most, its own embedding aside


@click.command()
@click.argument("directory", metavar="DIR", type=click.Path(path_type=Path))
@click.option(
    "--context",
    "context_tokens",
    type=click.IntRange(min=1),
    help="Tokens of context for the bytes read per decoded token.  [default: the engine's limit]",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def inspect(directory: Path, context_tokens: int | None, as_json: bool) -> None:
    """Check the engine DIR and tell what it is.

    All is checked that a load checks, but an engine for another processor is shown too.
    """
    manifest = read_manifest(directory)
    check_files(directory, manifest)
    check_plans(directory, manifest)
    derived = derive(manifest, context_tokens)
    if as_json:
        click.echo(msgspec.json.encode({**msgspec.to_builtins(manifest), "derived": derived}))
        return
    for line in _aligned(_rows(manifest, derived)):
        click.echo(line)
    if len(manifest.ranks) > 1:
        click.echo("ranks")
        for line in _table(_rank_rows(manifest, derived)):
            click.echo(f"  {line}")
    for name, tensors in _plans(manifest).items():
        click.echo(f"plan {name}: {_plan_text(manifest, directory / name)}")
        for line in _aligned(_tensor_rows(tensors)):
            click.echo(f"  {line}")
    click.echo("files")
    for line in _aligned(_file_rows(manifest)):
        click.echo(f"  {line}")


def derive(manifest: Manifest, context_tokens: int | None) -> Derived:
    """Raises EngineError when the context is longer than the engine's sequences."""
    limit = manifest.limits.max_sequence_length
    context = limit if context_tokens is None else context_tokens
    if context > limit:
        raise EngineError(
            f"a context of {context} tokens was asked for; the engine's limit is {limit}"
        )
    try:
        check_servable(manifest)
        variant, refusal = choose_variant(manifest.target), None
    except EngineError as error:
        variant, refusal = None, str(error)
    weights_bytes = _weights_bytes(manifest, manifest.ranks)
    kv_bytes_per_token = manifest.kv_block_bytes // manifest.kv.block_size
    is_gathered = isinstance(manifest.target, CpuTarget) and has_own_head(manifest)
    read_bytes = weights_bytes - (embedding_bytes(manifest) if is_gathered else 0)
    return Derived(
        runs_here=refusal is None,
        variant=variant,
        refusal=refusal,
        weights_bytes=weights_bytes,
        arena_bytes=sum(rank.arena_bytes for rank in manifest.ranks),
        total_bytes=sum(file.size_bytes for file in manifest.files.values()),
        kv_bytes_per_token=kv_bytes_per_token,
        kv_bytes_per_block=manifest.kv_block_bytes,
        context_tokens=context,
        decode_bytes_per_token=read_bytes + context * kv_bytes_per_token,
    )


def _weights_bytes(manifest: Manifest, ranks: Iterable[Rank]) -> int:
    """Of some ranks; files that they share count once."""
    names = {name for rank in ranks for name in (rank.weights, rank.shared_weights) if name}
    return sum(manifest.files[name].size_bytes for name in names)


def _rows(manifest: Manifest, derived: Derived) -> Iterable[Row]:
    model, target, limits, kv = manifest.model, manifest.target, manifest.limits, manifest.kv
    yield "engine", f"{manifest.name}, by llmbuild {manifest.llmbuild_version}"
    yield (
        "model",
        f"{model.get('family')}, {model.get('num_layers')} layers, {model.get('num_heads')} heads, "
        f"{model.get('num_kv_heads')} KV heads, head_dim {model.get('head_dim')}, "
        f"hidden {model.get('hidden_size')}, vocab {manifest.vocab_size}",
    )
    yield "precision", manifest.precision + (" where not quantised" if manifest.quantised else "")
    for kind, count in manifest.quantised_kinds.items():
        yield "quantised", f"{count} tensors to {kind}"
    changes = [("rotated", manifest.rotated), ("distilled", manifest.distilled)]
    if any(is_so for _, is_so in changes):
        yield "model was", ", ".join(word for word, is_so in changes if is_so)
    yield "target", target.describe()
    if isinstance(target, CpuTarget):
        yield "compiler", target.compiler
    yield (
        "runs here",
        f"yes, as {derived.variant}" if derived.runs_here else f"no: {derived.refusal}",
    )
    yield (
        "limits",
        f"{limits.max_sequence_length} tokens a sequence, {limits.max_step_tokens} tokens and "
        f"{limits.max_sequences} sequences a step",
    )
    if len(manifest.ranks) > 1:
        stages = manifest.parallel
        yield "parallel", f"{stages.pp} stages of {stages.tp} ranks"
    yield "decode buckets", ", ".join(map(str, manifest.buckets)) or "none"
    kinds = Counter(f"K {_dtypes(layer, 'k')}, V {_dtypes(layer, 'v')}" for layer in kv.layers)
    yield "KV", "; ".join(f"{kind} in {count} layers" for kind, count in kinds.items())
    yield "KV per token", _bytes(derived.kv_bytes_per_token)
    yield f"KV per block of {kv.block_size}", _bytes(derived.kv_bytes_per_block)
    is_plan = not isinstance(target, CpuTarget)
    yield "plans" if is_plan else "weights", _bytes(derived.weights_bytes)
    if isinstance(target, RtxTarget):
        slots_bytes = limits.max_sequences * derived.kv_bytes_per_block
        yield f"KV of {limits.max_sequences} sequences", _bytes(slots_bytes)
    if isinstance(target, CpuTarget):
        yield "arena", _bytes(derived.arena_bytes)
    yield (
        "read per decoded token",
        f"at most {_bytes(derived.decode_bytes_per_token)}, weights and the KV of "
        f"{derived.context_tokens} tokens",
    )
    yield "on disk", _bytes(derived.total_bytes)


def _rank_rows(manifest: Manifest, derived: Derived) -> Iterable[list[str]]:
    """What each rank has of the model, and what it takes; in the end all together."""
    kinds = ("layers", "query heads", "KV heads", "tokens")
    yield ["rank", "stage", *kinds, "weights", "arena", f"KV of {manifest.kv.block_size} tokens"]
    for index, rank in enumerate(manifest.ranks):
        spans = (rank.layers, rank.heads, rank.kv_heads, rank.tokens)
        yield [
            *(str(index), str(rank.stage), *map(_span, spans)),
            _bytes(_weights_bytes(manifest, [rank])),
            _bytes(rank.arena_bytes),
            _bytes(manifest.kv_of(rank).block_bytes),
        ]
    kept = (derived.weights_bytes, derived.arena_bytes, derived.kv_bytes_per_block)
    yield ["all", *[""] * (1 + len(kinds)), *map(_bytes, kept)]


def _span(span: Span) -> str:
    """From the first to the last: 0-14."""
    return f"{span.first}-{span.end - 1}"


def _table(rows: Iterable[list[str]]) -> list[str]:
    rows = list(rows)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]


def _dtypes(layer: KVLayer, kind: str) -> str:
    """Of a layer's K or V: int8, or of heads that differ int8 (2 heads) and int4 (1 heads)."""
    dtypes = Counter[str]()
    for run in layer.heads:
        dtypes[run.k_dtype if kind == "k" else run.v_dtype] += run.num_heads
    if len(dtypes) == 1:
        return next(iter(dtypes))
    return " and ".join(f"{dtype} ({count} heads)" for dtype, count in dtypes.items())


def _plans(manifest: Manifest) -> dict[str, list[PlanTensor]]:
    """The inputs and outputs of each plan, by its path inside the engine."""
    ranks = [rank for rank in manifest.ranks if rank.plan_tensors]
    return {name: rank.plan_tensors for rank in ranks for name in rank.executables.values()}


def _plan_text(manifest: Manifest, path: Path) -> str:
    """What a plan's header says of it; of tensorrt, whose plans' headers aren't known, its size and
    what the manifest says."""
    if isinstance(manifest.target, RtxTarget):
        header = read_plan_header(path)
        capabilities = ", ".join(header.capabilities)
        size = _bytes(header.size_bytes)
        return f"{size}, TensorRT for RTX {header.version}, for {capabilities}"
    return f"{_bytes(path.stat().st_size)}, {manifest.target.describe()}"


def _tensor_rows(tensors: Iterable[PlanTensor]) -> Iterable[Row]:
    """Those of all layers, which are alike, in one row: cache.0-29.k."""
    groups: dict[tuple[str, ...], list[str]] = {}
    for tensor in tensors:
        layer = _LAYER.search(tensor.name)
        name = _LAYER.sub(".{}.", tensor.name)
        kind = "input" if tensor.is_input else "output"
        groups.setdefault((kind, name, tensor.describe()), []).append(layer[1] if layer else "")
    for (kind, name, text), layers in groups.items():
        many = layers[0] if len(layers) == 1 else f"{layers[0]}-{layers[-1]}"
        yield f"{kind} {name.format(many)}", text


def _file_rows(manifest: Manifest) -> Iterable[Row]:
    return ((name, _bytes(file.size_bytes)) for name, file in manifest.files.items())


def _aligned(rows: Iterable[Row]) -> list[str]:
    rows = list(rows)
    width = max(len(label) for label, _ in rows)
    return [f"{label:<{width}}  {value}" for label, value in rows]


def _bytes(count: int) -> str:
    return f"{count:,} bytes" if count < 1_000_000 else f"{count / 1e6:,.1f} MB"
