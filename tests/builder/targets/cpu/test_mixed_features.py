"""Decoders with many features at once, compiled and held to the reference as builds are."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from llmbuild.builder.graph.pipeline import run_passes
from llmbuild.builder.graph.step_graph import StepGraph
from llmbuild.builder.models.config import (
    NO_ROPE,
    DecoderConfig,
    MoeConfig,
    NormConfig,
    RopeConfig,
)
from llmbuild.builder.sources.progress import PlainProgress
from llmbuild.builder.stages import Stages
from llmbuild.builder.verify import verify_engine
from llmbuild.runtime.engine import Engine

TOLERANCE = 1e-4
LONGROPE = RopeConfig(
    *("longrope", 1e4, 2),
    factors=(1.0,),
    long_factors=(3.0,),
    original_max_position=6,
    attention_factor=1.2,
)
MIXED: dict[str, dict[str, Any]] = {
    "in turn: post-norms, multipliers, soft caps, sinks, a NoPE layer, a window": {
        "post_norm": True,
        "embed_scale": 4.5,
        "residual_scale": 0.375,
        "logit_scale": 0.5,
        "attention_soft_cap": 1.5,
        "logit_soft_cap": 2.0,
        "attention_sinks": True,
        "activation": "gelu_tanh",
        "qk_norm": "head",
        "ropes": (LONGROPE,),
        "layer_ropes": (NO_ROPE, 0),
        "windows": (0, 5),
    },
    "in parallel: LayerNorm, learned positions, soft caps, multipliers, experts": {
        "parallel_residual": True,
        "norm": NormConfig(1e-5, "layer", bias=True),
        "learned_positions": True,
        "embed_scale": 2.0,
        "logit_scale": 1.5,
        "attention_soft_cap": 2.0,
        "logit_soft_cap": 3.0,
        "qkv_bias": True,
        "o_bias": True,
        "head_bias": True,
        "activation": "gelu",
        "ropes": (RopeConfig("dynamic", 1e4, 4, factor=2.0, original_max_position=6),),
        "moe": MoeConfig(5, 2, 7, normalise=True, shared_size=6, shared_gate=True),
        "moe_layers": (False, True),
    },
}


@pytest.mark.parametrize("overrides", MIXED.values(), ids=MIXED.keys())
def test_compiled_decoder_equals_the_reference(
    traced: Callable[..., StepGraph],
    decoder_config: Callable[..., DecoderConfig],
    random_tensors: Callable[[StepGraph], dict[str, NDArray[np.generic]]],
    build_engine: Callable[..., Engine],
    overrides: dict[str, Any],
) -> None:
    step = traced(**overrides)
    read = random_tensors(step).__getitem__
    run_passes(step)
    engine = build_engine(step, decoder_config(**overrides), read)
    stages = Stages(PlainProgress())
    verified = verify_engine(engine.root, engine.manifest, step, read, TOLERANCE, stages)
    assert verified.keys() == {engine.variant}
    assert verified[engine.variant] <= TOLERANCE
