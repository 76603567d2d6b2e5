"""How many KV blocks an engine gets: from a number of blocks, from bytes, or by default."""

import re

from llmbuild.errors import UserError
from llmbuild.runtime.manifest import Manifest

DEFAULT_KV_BYTES = 256 * 2**20  # cap of the default, so that no machine is filled unasked
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
    DEFAULT_KV_BYTES, but always enough for one.
    """
    if kv_memory is not None and num_blocks is not None:
        raise UserError(
            f"kv_memory={kv_memory!r} and num_blocks={num_blocks!r} both state the size of the "
            "KV memory; give one of them"
        )
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
        if given_bytes < MIN_BLOCKS * block_bytes:
            raise UserError(
                f"kv_memory is {given_bytes} bytes; the least for this engine is "
                f"{MIN_BLOCKS * block_bytes}: {MIN_BLOCKS} blocks of {block_bytes} bytes"
            )
        return given_bytes // block_bytes
    limits = manifest.limits
    one_sequence = -(-limits.max_sequence_length // manifest.kv.block_size)
    wanted = limits.max_sequences * one_sequence + 1
    return max(min(wanted, DEFAULT_KV_BYTES // block_bytes), one_sequence + 1)
