"""Ranks for manifests that tests write themselves."""

from collections.abc import Mapping

from llmbuild.runtime.manifest import KVLayout, Rank, Span


def whole_rank(
    kv: KVLayout,
    vocab_size: int,
    *,
    num_heads: int = 1,
    executables: Mapping[str, str] | None = None,
    weights: str = "w",
    arena_bytes: int = 1,
) -> Rank:
    """The one rank of an engine, which has all of the model."""
    return Rank(
        stage=0,
        tp_rank=0,
        layers=Span(first=0, count=len(kv.layers)),
        heads=Span(first=0, count=num_heads),
        kv_heads=Span(first=0, count=kv.num_kv_heads),
        tokens=Span(first=0, count=vocab_size),
        executables=dict(executables or {}),
        weights=weights,
        shared_weights=None,
        arena_bytes=arena_bytes,
    )
