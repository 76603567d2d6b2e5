"""How many KV blocks an engine gets: from a number of blocks, from bytes, or by default."""

import os
import re

from llmbuild.errors import UserError
from llmbuild.runtime.manifest import Manifest
from llmbuild.runtime.target import CpuTarget, RtxTarget

# Caps of the default, so that no machine is filled unasked. A GPU's memory is there for it; and of
# tensorrt-rtx a block holds a whole sequence.
DEFAULT_KV_BYTES = 256 * 2**20
DEFAULT_GPU_KV_BYTES = 4 * 2**30
MAX_GPU_KV_BYTES = 2**42  # more than any GPU has
MIN_BLOCKS = 2  # the scratch block and one for a sequence

UNIT_BYTES = {
    "": 1,
    "b": 1,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
    "kib": 2**10,
    "mib": 2**20,
    "gib": 2**30,
    "tib": 2**40,
}


def parse_bytes(size: int | str) -> int:
    """Bytes of a size such as 1048576, "512MiB" or "1.5 GB"; raises UserError."""
    if isinstance(size, int) and not isinstance(size, bool):
        return size
    pattern = r"(\d{1,18}(?:\.\d{1,18})?)\s*([a-zA-Z]*)"
    match = re.fullmatch(pattern, size.strip(), re.ASCII) if isinstance(size, str) else None
    unit = UNIT_BYTES.get(match[2].lower()) if match else None
    if match is None or unit is None:
        raise UserError(
            f"kv_memory: {size!r} isn't a size; give bytes as a number, or text such as "
            '"512MiB" or "1GB" (B, KB, MB, GB, TB, KiB, MiB, GiB, TiB)'
        )
    return int(float(match[1]) * unit) if "." in match[1] else int(match[1]) * unit


def choose_num_blocks(
    manifest: Manifest, kv_memory: int | str | None, num_blocks: int | None
) -> int:
    """Blocks of the pool, the scratch block included; raises UserError.

    By default as many as max_sequences sequences of full length need, within
    DEFAULT_KV_BYTES (DEFAULT_GPU_KV_BYTES), but always enough for one.
    """
    if kv_memory is not None and num_blocks is not None:
        raise UserError(
            f"kv_memory={kv_memory!r} and num_blocks={num_blocks!r} both state the size of the "
            "KV memory; give one of them"
        )
    chosen = _choose(manifest, kv_memory, num_blocks)
    most_bytes = MAX_GPU_KV_BYTES if _is_on_gpu(manifest) else _machine_bytes()
    if kv_bytes(manifest, chosen) > most_bytes:
        raise UserError(
            f"{chosen} KV blocks take {kv_bytes(manifest, chosen)} bytes, and there are at most "
            f"{most_bytes}; give less kv_memory or fewer num_blocks"
        )
    return chosen


def _choose(manifest: Manifest, kv_memory: int | str | None, num_blocks: int | None) -> int:
    block_bytes = manifest.kv_block_bytes  # on all ranks together
    if num_blocks is not None:
        if not isinstance(num_blocks, int) or isinstance(num_blocks, bool):
            raise UserError(f"num_blocks: {num_blocks!r} isn't a whole number")
        if num_blocks < MIN_BLOCKS:
            raise UserError(
                f"num_blocks is {num_blocks}; the least is {MIN_BLOCKS}: the scratch block and "
                "one for a sequence"
            )
        return num_blocks
    if kv_memory is not None:
        given_bytes = parse_bytes(kv_memory)
        num_blocks = given_bytes // block_bytes + _blocks_without_memory(manifest)
        if num_blocks < MIN_BLOCKS:
            least = MIN_BLOCKS - _blocks_without_memory(manifest)
            raise UserError(
                f"kv_memory is {given_bytes} bytes; the least for this engine is "
                f"{least * block_bytes}: {least} blocks of {block_bytes} bytes"
            )
        return num_blocks
    limits = manifest.limits
    one_sequence = -(-limits.max_sequence_length // manifest.kv.block_size)
    wanted = limits.max_sequences * one_sequence + 1
    most_bytes = DEFAULT_GPU_KV_BYTES if _is_on_gpu(manifest) else DEFAULT_KV_BYTES
    most = most_bytes // block_bytes + _blocks_without_memory(manifest)
    return max(min(wanted, most), one_sequence + 1)


def kv_bytes(manifest: Manifest, num_blocks: int) -> int:
    """Bytes of KV memory that all ranks hold with so many blocks."""
    return (num_blocks - _blocks_without_memory(manifest)) * manifest.kv_block_bytes


def _is_on_gpu(manifest: Manifest) -> bool:
    return not isinstance(manifest.target, CpuTarget)


def _machine_bytes() -> int:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _blocks_without_memory(manifest: Manifest) -> int:
    """On slots padding is left out of what is run: the scratch block is no more than a number."""
    return 1 if isinstance(manifest.target, RtxTarget) else 0
