"""Small decoders as configs and as step graphs, for the tests of what makes engines of them."""

from collections.abc import Callable, Mapping
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray

from llmbuild.builder.graph.pipeline import run_passes
from llmbuild.builder.graph.step_graph import StepGraph
from llmbuild.builder.graph.trace import trace
from llmbuild.builder.models.config import DecoderConfig, NormConfig, RopeConfig

# No two sizes are equal, and head_dim isn't hidden_size / num_heads.
SMALL = {
    "family": "llama",
    "vocab_size": 37,
    "hidden_size": 20,
    "intermediate_size": 19,
    "num_layers": 2,
    "num_heads": 6,
    "num_kv_heads": 2,
    "head_dim": 4,
    "norm": NormConfig(1e-5),
    "ropes": (RopeConfig("default", 1e4, 4),),
    "layer_ropes": (0, 0),
    "attention_scale": 0.5,
    "max_position": 64,
    "tie_embeddings": False,
    "qk_norm": "",
    "qkv_bias": False,
    "o_bias": False,
    "mlp_bias": False,
    "windows": (0, 0),
}


@pytest.fixture(scope="session")
def decoder_config() -> Callable[..., DecoderConfig]:
    """decoder_config(**overrides): two layers, six heads in two groups."""
    return lambda **overrides: DecoderConfig(**(SMALL | overrides))


@pytest.fixture(scope="session")
def traced(decoder_config: Callable[..., DecoderConfig]) -> Callable[..., StepGraph]:
    """traced(precision="fp32", **overrides): a step graph of its own, before any pass."""
    known: dict[str, StepGraph] = {}

    def copy(precision: str = "fp32", **overrides: Any) -> StepGraph:
        key = f"{precision} {sorted(overrides.items())}"
        if key not in known:
            known[key] = trace(decoder_config(**overrides), precision)
        step = known[key]
        return StepGraph(step.model.clone(), dict(step.weights), dict(step.constants))

    return copy


@pytest.fixture(scope="session")
def lowerable(traced: Callable[..., StepGraph]) -> Callable[..., StepGraph]:
    """lowerable(precision="fp32", **overrides): a step graph that went through the passes."""

    def build(precision: str = "fp32", **overrides: Any) -> StepGraph:
        step = traced(precision, **overrides)
        run_passes(step)
        return step

    return build


@pytest.fixture(scope="session")
def random_tensors() -> Callable[..., dict[str, NDArray[np.generic]]]:
    """random_tensors(step): values for the canonical tensors of a step graph before any pass."""

    def build(step: StepGraph) -> dict[str, NDArray[np.generic]]:
        rng = np.random.default_rng(7)
        return {name: _random(rng, name, weight.shape) for name, weight in _single(step).items()}

    return build


def _single(step: StepGraph) -> Mapping[str, Any]:
    assert all(weight.sources == (name,) for name, weight in step.weights.items())
    return step.weights


def _random(rng: np.random.Generator, name: str, shape: tuple[int, ...]) -> NDArray[np.generic]:
    """Matrices that bf16 holds exactly, so that precision changes no weight; norms near 1."""
    values = rng.standard_normal(shape, np.float32)
    if len(shape) == 2:
        values *= np.float32(1.5 * shape[1] ** -0.5)
        return values.astype(ml_dtypes.bfloat16).astype(np.float32)
    return np.float32("norm" in name) + np.float32(0.3) * values
