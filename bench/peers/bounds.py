"""The least time that a machine needs for a case, by the bytes and operations of the model."""

from collections.abc import Sequence

from bench.cases import SHAPES
from bench.machine import MEMORY, Machine
from bench.peers.workload import Case
from bench.roofline import Roofs, Work

SHAPE = SHAPES["smollm2-135m"]
LAYERS = SHAPE.layers
LAYER_WEIGHTS = SHAPE.hidden * (SHAPE.qkv + SHAPE.q + 3 * SHAPE.inner)
HEAD_WEIGHTS = SHAPE.hidden * SHAPE.vocab


def roofs(machines: Sequence[Machine], peak: str) -> Roofs:
    """The highest of several measurements; fp32's peak where the processor lacks the one asked."""

    def best_peak(name: str) -> float:
        return max(machine.operations_per_s[name] or 0.0 for machine in machines)

    bandwidth = max(machine.read_bytes_per_s[MEMORY] for machine in machines)
    return Roofs(bandwidth, bandwidth, best_peak(peak) or best_peak("fp32"))


def least_work(case: Case, weights_bytes: int, kv_token_bytes: float) -> Work:
    """Of what the case's rate counts.

    Weights are read once a step, in as few steps as there can be: one for all prompts, then as
    many as the longest output. A decode step reads the KV of its sequences; prompts are attended
    to from caches.
    """
    prompt_tokens, decode_tokens, logit_rows, keys, kv_tokens = 0, 0, 0, 0, 0
    for prompt, new in zip(case.prompts, case.new_tokens, strict=True):
        length = len(prompt)
        if case.measure != "decode":
            prompt_tokens += length
            logit_rows += 1
            keys += length * (length + 1) // 2
        seen = sum(range(length + 1, length + new))  # of each output token after the first
        decode_tokens += new - 1
        logit_rows += new - 1
        keys += seen
        kv_tokens += seen
    steps = max(case.new_tokens) - (1 if case.measure == "decode" else 0)
    return Work(
        cold_bytes=round(steps * weights_bytes + kv_tokens * kv_token_bytes),
        operations=2 * LAYERS * LAYER_WEIGHTS * (prompt_tokens + decode_tokens)
        + 2 * HEAD_WEIGHTS * logit_rows
        + 4 * LAYERS * SHAPE.q * keys,
    )


def kv_token_bytes(item_bytes: float) -> float:
    """Of a token over all layers, K and V."""
    return 2 * LAYERS * SHAPE.kv * item_bytes
