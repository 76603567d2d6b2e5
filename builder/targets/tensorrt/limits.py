"""What a plan is built for: how large its inputs get, and what activations and caches are."""

from dataclasses import dataclass
from typing import Literal

ActivationDtype = Literal["fp16", "bf16"]

# The network's inputs. B sequences have a row each, of L tokens; T is B * L. Every input is int32,
# but for the caches and `hidden`, which have the activations' dtype.
TOKEN_IDS = "token_ids"  # [B, L]
POSITIONS = "positions"  # [B, L], below the capacity for padding, too
KV_LENGTHS = "kv_lengths"  # [B]: write_indices + L, so padding, which stands last, counts
WRITE_INDICES = "write_indices"  # [B]: tokens that the row's cache holds before the step
LOGIT_ROWS = "logit_rows"  # [R]: row b's token i is b * L + i
HIDDEN = "hidden"  # [T, hidden], in place of the embedding in a stage that isn't the first


@dataclass(frozen=True)
class Limits:
    """batch: sequences of a step. chunk: tokens of a sequence in a step. capacity: tokens that a
    sequence's KV cache has room for, padding included."""

    batch: int
    chunk: int
    capacity: int


def cache_name(layer: int, kind: str) -> str:
    """Of the input [B, KV heads, capacity, head_dim]; kind: "k" or "v". `layer` counts the rank's
    own from 0."""
    return f"cache.{layer}.{kind}"


def updated_name(layer: int, kind: str) -> str:
    """Of the output that is the cache after the step. It must be bound to the input's memory."""
    return f"cache.{layer}.{kind}.updated"
