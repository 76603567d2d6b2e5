"""Ragged steps and empty KV pools for step graphs that are run in torch."""

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch

from llmbuild.builder.models.config import DecoderConfig
from llmbuild.plugins.common.kv_pools import LayerPools
from llmbuild.runtime.batch import StepBatch

BLOCK_SIZE = 4
# Blocks of three sequences, scattered; 0 belongs to none.
TABLES = np.array([[5, 2, 9, 0], [7, 1, 8, 4], [3, 0, 0, 0]], np.int32)
NUM_BLOCKS = 10
# Steps: {sequence: (tokens before, tokens after)}. Prefill of several, chunks, decode beside them.
STEPS = (
    {0: (0, 5), 2: (0, 1)},
    {1: (0, 3)},
    {1: (3, 13), 0: (5, 6)},
    {0: (6, 7), 1: (13, 14), 2: (1, 2)},
    {2: (2, 4), 0: (7, 12)},
)

VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "one layer": {"num_layers": 1, "windows": (0,)},
    "tied, biases, one group": {
        "tie_embeddings": True,
        "qkv_bias": True,
        "o_bias": True,
        "mlp_bias": True,
        "num_heads": 3,
        "num_kv_heads": 1,
    },
    "QK-norm, a window": {"qk_norm": True, "windows": (0, 5)},
    "bf16, Q, K, V biases": {"precision": "bf16", "qkv_bias": True, "windows": (1, 0)},
}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A test that takes `variant` runs for each one."""
    if "variant" in metafunc.fixturenames:
        metafunc.parametrize("variant", VARIANTS.values(), ids=VARIANTS.keys())


@pytest.fixture(scope="session")
def batches() -> list[StepBatch]:
    """Ragged steps that follow one another, some rows' logits wanted."""
    return [_batch(np.random.default_rng(index), step) for index, step in enumerate(STEPS)]


def _batch(rng: np.random.Generator, step: dict[int, tuple[int, int]]) -> StepBatch:
    spans = list(step.values())
    starts = np.cumsum([0, *(end - begin for begin, end in spans)]).astype(np.int32)
    last_two = [range(max(begin, end - 2), end) for begin, end in pairwise(starts)]
    return StepBatch(
        token_ids=rng.integers(0, 37, starts[-1]).astype(np.int32),
        positions=np.concatenate([np.arange(*span, dtype=np.int32) for span in spans]),
        query_start=starts,
        kv_lengths=np.array([end for _, end in spans], np.int32),
        block_tables=TABLES[list(step)],
        logit_rows=np.concatenate(last_two).astype(np.int32),
    )


@pytest.fixture(scope="session")
def empty_pools(
    decoder_config: Callable[..., DecoderConfig],
) -> Callable[..., list[LayerPools]]:
    """empty_pools(precision="fp32", **overrides): NaN everywhere but in the scratch block, so
    that a slot read without having been written shows."""

    def build(precision: str = "fp32", **overrides: Any) -> list[LayerPools]:
        config = decoder_config(**overrides)
        dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[precision]
        shape = (NUM_BLOCKS, config.num_kv_heads, BLOCK_SIZE, config.head_dim)
        layers = range(config.num_layers)
        pools = [
            LayerPools(*(torch.full(shape, torch.nan, dtype=dtype) for _ in "kv")) for _ in layers
        ]
        for layer in pools:
            layer.k[0] = layer.v[0] = 0.0
        return pools

    return build
