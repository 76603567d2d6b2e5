"""Ragged steps and empty KV pools for step graphs that are run in torch."""

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch

from llmbuild.builder.models.config import (
    NO_ROPE,
    DecoderConfig,
    MoeConfig,
    NormConfig,
    RopeConfig,
)
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

# Of plain decoders every fusion is placed, the same for each.
PLAIN: dict[str, dict[str, Any]] = {
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
    "QK-norm, a window": {"qk_norm": "head", "windows": (0, 5)},
    "bf16, Q, K, V biases": {"precision": "bf16", "qkv_bias": True, "windows": (1, 0)},
}
NO_ROPES = {"ropes": (), "layer_ropes": (NO_ROPE, NO_ROPE)}
LAYER_NORM = NormConfig(1e-5, "layer", bias=True)
LONGROPE = RopeConfig(
    "longrope",
    *(1e4, 4),
    factors=(1.0, 2.0),
    long_factors=(1.5, 4.0),
    original_max_position=6,
    attention_factor=1.2,
)
FEATURES: dict[str, dict[str, Any]] = {
    "post-norms, soft caps, multipliers": {
        "post_norm": True,
        "attention_soft_cap": 1.5,
        "logit_soft_cap": 2.0,
        "embed_scale": 4.5,
        "residual_scale": 0.375,
        "logit_scale": 0.5,
        "activation": "gelu_tanh",
    },
    "post-norms alone, whole QK-norm, a NoPE layer": {
        "pre_norm": False,
        "post_norm": True,
        "qk_norm": "whole",
        "layer_ropes": (NO_ROPE, 0),
    },
    "parallel residual of one LayerNorm, part of a head turns": {
        "parallel_residual": True,
        "shared_norm": True,
        "norm": NormConfig(1e-5, "layer"),
        "ropes": (RopeConfig("default", 1e4, 2),),
    },
    "parallel residual of two RMSNorms": {"parallel_residual": True, "logit_scale": 0.25},
    "learned positions, LayerNorm, plain MLP": {
        **NO_ROPES,
        "learned_positions": True,
        "norm": LAYER_NORM,
        "gated_mlp": False,
        "activation": "gelu",
        "qkv_bias": True,
        "o_bias": True,
        "mlp_bias": True,
        "head_bias": True,
    },
    "experts and a shared one beside": {
        "moe": MoeConfig(5, 2, 7, normalise=True, shared_size=6, shared_gate=True),
        "moe_layers": (True, False),
    },
    "sinks, RoPE by a sequence's length": {
        "attention_sinks": True,
        "ropes": (LONGROPE, RopeConfig("dynamic", 1e4, 4, factor=2.0, original_max_position=6)),
        "layer_ropes": (0, 1),
    },
}
VARIANTS = PLAIN | FEATURES


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A test that takes `variant`, or only a `plain_variant`, runs for each one."""
    for name, variants in {"variant": VARIANTS, "plain_variant": PLAIN}.items():
        if name in metafunc.fixturenames:
            metafunc.parametrize(name, variants.values(), ids=variants.keys())


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
