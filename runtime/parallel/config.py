"""What a rank's native code is told of the others."""

import ctypes
from collections.abc import Sequence

from llmbuild.runtime.executors.cpu import RanksConfig
from llmbuild.runtime.manifest import Manifest
from llmbuild.runtime.parallel.memory import RanksMemory


def ranks_config(
    manifest: Manifest, rank: int, timeout_s: float, link: RanksMemory | Sequence[int]
) -> RanksConfig:
    """link: the memory that all share, or the descriptor of a socket to each, -1 for the rank."""
    parallel = manifest.parallel
    firsts = [each.tokens.first for each in manifest.ranks[: parallel.tp]]
    tokens = (ctypes.c_int32 * (parallel.tp + 1))(*firsts, manifest.vocab_size)
    config = RanksConfig(
        rank=rank,
        tp=parallel.tp,
        pp=parallel.pp,
        timeout_ms=max(1, round(timeout_s * 1000)),
        token_firsts=tokens,
    )
    if isinstance(link, RanksMemory):
        config.memory, config.memory_bytes = link.address, link.size_bytes
    else:
        config.sockets = (ctypes.c_int32 * len(link))(*link)
    return config
