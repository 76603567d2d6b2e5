"""Decoders whose KV cache is of several dtypes, compiled and held to the reference."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from llmbuild.builder.graph.passes.kv_scales import place_kv_scales
from llmbuild.builder.graph.pipeline import run_passes
from llmbuild.builder.graph.step_graph import StepGraph
from llmbuild.builder.models.config import DecoderConfig
from llmbuild.builder.sources.progress import PlainProgress
from llmbuild.builder.stages import Stages
from llmbuild.builder.verify import verify_engine
from llmbuild.runtime.engine import Engine
from llmbuild.runtime.manifest import KVLayer, KVLayout

# The largest difference from the reference, of the largest logit. What meets codes is rounded to 15
# bits, so in a second layer an element may lie on the other side of the middle between two codes
# than in the reference: a step of a fifteenth of a row's range in int4.
ROUNDING, TIES = 5e-4, 2e-2

Pairs = Sequence[tuple[str, str]]  # K's and V's dtype of each KV head
LAYOUTS: dict[str, tuple[list[Pairs], dict[str, Any]]] = {
    "int4": ([[("int4", "int4")] * 3], {}),
    "K and V differ, blocks of an odd size": (
        [[("int8", "int4")] * 3],
        {"block_size": 5, "head_dim": 6},
    ),
    "heads differ": (
        [[("int4", "int8-static"), ("bf16", "fp32"), ("int4", "int8-static")]],
        {"attention_sinks": True, "block_size": 16},
    ),
    "layers and heads differ": (
        [
            [("int8-static", "int4"), ("int8-static", "int4"), ("fp32", "int8-static")],
            [("int4", "bf16")] * 3,
        ],
        {"qk_norm": "head", "windows": (0, 7)},
    ),
}


QUICK = ("heads differ", "layers and heads differ")


@pytest.mark.parametrize(
    "case", [pytest.param(c, marks=() if c in QUICK else pytest.mark.slow) for c in LAYOUTS]
)
def test_a_decoder_with_a_mixed_kv_cache_equals_the_reference(
    traced: Callable[..., StepGraph],
    decoder_config: Callable[..., DecoderConfig],
    random_tensors: Callable[[StepGraph], dict[str, NDArray[np.generic]]],
    build_engine: Callable[..., Engine],
    case: str,
) -> None:
    layers, changes = LAYOUTS[case]
    overrides = {"num_kv_heads": 3, "head_dim": 16, "num_layers": len(layers)} | changes
    overrides |= {"layer_ropes": (0,) * len(layers)}
    overrides.setdefault("windows", (0,) * len(layers))
    block_size = overrides.pop("block_size", 4)
    step, config = traced(**overrides), decoder_config(**overrides)
    read = random_tensors(step).__getitem__
    run_passes(step)
    place_kv_scales(step, channel_scales(config))
    kv = KVLayout(
        block_size=block_size,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        layers=[KVLayer.of_heads(pairs) for pairs in layers],
    )
    engine = build_engine(step, config, read, kv)
    stages = Stages(PlainProgress())
    bound = ROUNDING if len(layers) == 1 else TIES
    verified = verify_engine(engine.root, engine.manifest, step, read, bound, stages)
    assert verified[engine.variant] <= bound


def channel_scales(config: DecoderConfig) -> dict[str, NDArray[np.float32]]:
    """For codes of values up to 2 or so; the two elements that turn together have one."""
    rng, half = np.random.default_rng(5), config.head_dim // 2
    scales = {}
    for layer in range(config.num_layers):
        pairs = rng.uniform(0.01, 0.05, (config.num_kv_heads, half))
        scales[f"layers.{layer}.k_scale"] = np.tile(pairs, 2).ravel().astype(np.float32)
        values = rng.uniform(0.01, 0.05, config.num_kv_heads * config.head_dim)
        scales[f"layers.{layer}.v_scale"] = values.astype(np.float32)
    return scales
