"""What a manifest says of its ranks and plans that doesn't fit what else it says."""

from collections.abc import Iterable
from typing import TYPE_CHECKING

from llmbuild.runtime.target import PlanTensor

if TYPE_CHECKING:  # which imports this module
    from llmbuild.runtime.manifest import Manifest, Rank, Span

_DTYPES = {"int32", "int64", "fp16", "bf16", "fp32"}

Described = tuple[str, list[int | str], bool]  # dtype, shape, and whether it is an input


def slot_contradictions(manifest: "Manifest") -> list[str]:
    """Of tensorrt-rtx: ranks whose plans haven't the linear caches that the KV layout asks for."""
    length, kv = manifest.limits.max_sequence_length, manifest.kv
    faults = []
    if kv.block_size != length:
        faults.append(f"KV blocks of {kv.block_size} tokens, but sequences of {length}")
    for index, rank in enumerate(manifest.ranks):
        shape: list[int | str] = ["B", rank.kv_heads.count, length, kv.head_dim]
        names = [f"cache.{layer}.{kind}" for layer in range(rank.layers.count) for kind in "kv"]
        wanted: dict[str, Described] = dict.fromkeys(names, (manifest.precision, shape, True))
        wanted |= {f"{name}.updated": (manifest.precision, shape, False) for name in names}
        faults += _differing(index, rank, "cache", wanted)
    return faults


def pool_contradictions(manifest: "Manifest") -> list[str]:
    """Of tensorrt: ranks whose plans don't take the addresses of the KV layout's pools."""
    faults: list[str] = []
    for index, rank in enumerate(manifest.ranks):
        kv = manifest.kv_of(rank)
        mixed = [number for number, layer in enumerate(kv.layers) if len(layer.heads) > 1]
        faults += [f"KV layer {n} of rank {index} has heads of several dtypes" for n in mixed]
        if not mixed:
            wanted: dict[str, Described] = dict.fromkeys(kv.pool_bytes, ("int64", [1], True))
            faults += _differing(index, rank, "pool", wanted)
    return faults


def _differing(index: int, rank: "Rank", kind: str, wanted: dict[str, Described]) -> Iterable[str]:
    """Where a plan hasn't these tensors of a kind, and no others."""
    tensors = {tensor.name: _described(tensor) for tensor in rank.plan_tensors}
    given = {name: each for name, each in tensors.items() if name.startswith(f"{kind}.")}
    differing = [n for n in sorted({*wanted, *given}) if wanted.get(n) != given.get(n)]
    if differing:
        yield f"rank {index}'s plan has other {kind}s than its layers: {differing[0]}"
    dtypes = {tensor.dtype for tensor in rank.plan_tensors}
    yield from (f"dtype {each!r} of a plan" for each in sorted(dtypes - _DTYPES))


def _described(tensor: PlanTensor) -> Described:
    return tensor.dtype, tensor.shape, tensor.is_input


def rank_contradictions(manifest: "Manifest") -> list[str]:
    """Ranks that aren't a whole model together."""
    tp, pp, ranks = manifest.parallel.tp, manifest.parallel.pp, manifest.ranks
    if len(ranks) != tp * pp:
        return [f"{len(ranks)} ranks, but parallel.tp {tp} and parallel.pp {pp}"]
    faults = [
        f"rank {index} is stage {rank.stage}, tp_rank {rank.tp_rank} of {pp} stages of {tp} ranks"
        for index, rank in enumerate(ranks)
        if (rank.stage, rank.tp_rank) != divmod(index, tp)
    ]
    num_heads = manifest.model.get("num_heads")
    layers, stages = len(manifest.kv.layers), ranks[::tp]
    faults += _cover_faults("layers of the stages", [rank.layers for rank in stages], layers)
    for rank in stages:
        group = ranks[rank.stage * tp : (rank.stage + 1) * tp]
        where = f"of stage {rank.stage}'s ranks"
        if any(each.layers != rank.layers for each in group):
            faults.append(f"layers {where} differ")
        faults += _cover_faults(f"heads {where}", [each.heads for each in group], num_heads)
        tokens = [each.tokens for each in group]
        faults += _cover_faults(f"tokens {where}", tokens, manifest.vocab_size)
        most = manifest.kv.num_kv_heads
        faults += [
            f"KV heads up to {each.kv_heads.end} {where}, but kv.num_kv_heads {most}"
            for each in group
            if each.kv_heads.end > most
        ]
    return faults


def _cover_faults(what: str, spans: "list[Span]", total: object) -> list[str]:
    """Unless the spans, one after the other, are all of `total`."""
    firsts, ends = [span.first for span in spans], [span.end for span in spans]
    if firsts == [0, *ends[:-1]] and ends[-1] == total:
        return []
    shown = ", ".join(f"{span.first} to {span.end}" for span in spans)
    return [f"{what} are {shown}, but the model has {total}"]
