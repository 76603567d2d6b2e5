"""Tile sizes of the Triton kernels, by operation and SM."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Tiles:
    """How a kernel cuts its work: one program takes `rows` x `columns` of the result, `depth` of
    what it sums over at a time. What a kernel doesn't cut is 1."""

    rows: int
    columns: int
    depth: int
    num_warps: int
    num_stages: int
    source: str  # where the entry comes from


# Nothing was timed on a GPU: each entry is a size that compiles within the gates.
_GUESS = "guess: within 48 KB of shared memory and 255 registers, without spills"

# Operation -> the first SM an entry is for -> the entry. An SM without one takes the nearest below.
_TABLE: dict[str, dict[int, Tiles]] = {
    # One row of activations a program; columns are the power of two that a kernel derives.
    "rms_norm": {
        80: Tiles(1, 1, 1, 4, 1, _GUESS),
        100: Tiles(1, 1, 1, 8, 1, _GUESS),  # with 4 warps some spill 16 bytes
        120: Tiles(1, 1, 1, 4, 1, _GUESS),
    },
    "layer_norm": {80: Tiles(1, 1, 1, 4, 1, _GUESS)},
    # rows = tokens.
    "rope_kv_write": {80: Tiles(4, 1, 1, 4, 1, _GUESS)},
    # Elementwise over rows, `columns` at a time.
    "gated_activation": {80: Tiles(1, 1024, 1, 4, 1, _GUESS)},
    "elementwise": {80: Tiles(1, 1024, 1, 4, 1, _GUESS)},
    "gather_rows": {80: Tiles(1, 1024, 1, 4, 1, _GUESS)},
    "rope_table": {80: Tiles(1, 1, 1, 1, 1, _GUESS)},
    # columns = tokens, or parts of the vocabulary, that are looked at together.
    "sample.parts": {80: Tiles(1, 4096, 1, 4, 1, _GUESS)},
    "sample.greedy": {80: Tiles(1, 64, 1, 1, 1, _GUESS)},
    "sample.draw": {80: Tiles(1, 4096, 1, 16, 1, _GUESS)},
    # columns = output features, depth = input features that are read at a time, here 128 words.
    # rows = tokens up to which tensor cores are likely not worth their trouble.
    "linear.gemv_4bit": {80: Tiles(4, 8, 1024, 4, 1, _GUESS)},
    "linear.gemv_8bit": {80: Tiles(4, 8, 512, 4, 1, _GUESS)},
    # rows = tokens, columns = output features, depth = input features. Less than 64 output features
    # keep sm_100 off tensor memory, which a plugin may not use.
    "linear.gemm_few": {
        80: Tiles(16, 64, 64, 4, 4, _GUESS),
        100: Tiles(16, 32, 64, 4, 4, _GUESS),
        120: Tiles(16, 64, 64, 4, 4, _GUESS),
    },
    "linear.gemm_many": {
        80: Tiles(64, 64, 64, 4, 3, _GUESS),
        86: Tiles(64, 64, 64, 4, 2, _GUESS),  # with three stages some spill 24 bytes
        90: Tiles(64, 64, 64, 4, 3, _GUESS),
        100: Tiles(64, 32, 64, 4, 3, _GUESS),
        120: Tiles(64, 64, 64, 4, 2, _GUESS),  # with three stages some spill 8 bytes
    },
    "linear.quantise_rows": {80: Tiles(1, 1024, 1, 4, 1, _GUESS)},
    "moe.experts": {80: Tiles(16, 64, 32, 4, 3, _GUESS)},
    "moe.route": {80: Tiles(1, 1, 1, 1, 1, _GUESS)},
    # rows = queries, columns = keys read at a time. Less than 64 rows keeps sm_100 off tensor
    # memory, which a plugin may not use.
    "paged_attention.prefill": {
        80: Tiles(64, 32, 1, 4, 2, _GUESS),
        86: Tiles(64, 32, 1, 8, 2, _GUESS),  # with 4 warps some spill 20 bytes
        90: Tiles(64, 32, 1, 4, 2, _GUESS),
        100: Tiles(32, 32, 1, 4, 2, _GUESS),
        120: Tiles(64, 32, 1, 4, 2, _GUESS),
    },
    "paged_attention.decode": {
        80: Tiles(16, 64, 1, 4, 2, _GUESS),
        100: Tiles(16, 32, 1, 4, 2, _GUESS),  # with 64 keys some spill 4 bytes
        120: Tiles(16, 64, 1, 4, 2, _GUESS),
    },
    "paged_attention.combine": {80: Tiles(1, 1, 1, 2, 1, _GUESS)},
}


def tuned(op: str, sm: int) -> Tiles:
    """The entry of `op` for `sm`, or for the nearest SM below it that has one."""
    entries = _TABLE[op]
    return entries[max(first for first in entries if first <= sm)]
