"""What the tests of the GPU executor share: an engine with what emulates it, and steps."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from llmbuild.builder.graph.reference import run_steps
from llmbuild.builder.models.config import DecoderConfig
from llmbuild.builder.targets.tensorrt.emulation.emulate import Emulated
from llmbuild.plugins.common.kv_pools import LayerPools
from llmbuild.runtime.batch import StepBatch

NUM_BLOCKS = 7  # one less than the engine's sequences and the scratch block need


@dataclass
class Compiled:
    """An engine, what emulates its plan, and what the reference needs."""

    root: Path
    config: DecoderConfig
    emulated: Emulated
    step: Any
    read: Any
    limits: Any


def reference_tokens(compiled: Compiled, prompt: Sequence[int], count: int) -> list[int]:
    """The likeliest tokens by the torch reference, in fp32, each from the whole sequence anew."""
    tokens, config = list(prompt), compiled.config
    shape, dtypes = (2, config.num_kv_heads, 64, config.head_dim), ["fp32"] * config.num_kv_heads
    for _ in range(count):
        pools = [LayerPools.filled(shape, dtypes, dtypes) for _ in range(config.num_layers)]
        (logits,) = run_steps(compiled.step, compiled.read, [prefill(tokens, 0)], pools)
        tokens.append(int(logits[0].argmax()))
    return tokens[len(prompt) :]


def prefill(tokens: Sequence[int], slot: int) -> StepBatch:
    count = len(tokens)
    return StepBatch(
        token_ids=np.array(tokens, np.int32),
        positions=np.arange(count, dtype=np.int32),
        query_start=np.array([0, count], np.int32),
        kv_lengths=np.array([count], np.int32),
        block_tables=np.array([[slot + 1]], np.int32),
        logit_rows=np.array([count - 1], np.int32),
    )


def decode(tokens: dict[int, tuple[int, int]]) -> StepBatch:
    """tokens: by slot, a position and the token there."""
    count = len(tokens)
    positions = np.array([position for position, _ in tokens.values()], np.int32)
    return StepBatch(
        token_ids=np.array([token for _, token in tokens.values()], np.int32),
        positions=positions,
        query_start=np.arange(count + 1, dtype=np.int32),
        kv_lengths=positions + 1,
        block_tables=np.array([[slot + 1] for slot in tokens], np.int32),
        logit_rows=np.arange(count, dtype=np.int32),
    )
