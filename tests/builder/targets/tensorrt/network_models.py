"""Small decoders that the emitter is tested with, and how their weights are quantised."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmbuild.builder.graph.materialise import ReadTensor
from llmbuild.builder.graph.step_graph import StepGraph
from llmbuild.builder.models.canonical import expected_tensors
from llmbuild.builder.models.config import NO_ROPE, DecoderConfig, NormConfig, RopeConfig
from llmbuild.quant.grid import QuantisedMatrix, WeightGrid
from llmbuild.quant.plan import QuantPlan

# What families ask for, besides what the small Llama has.
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "tied": {"tie_embeddings": True},
    "qwen3": {"qk_norm": "head"},
    "gemma": {
        "activation": "gelu_tanh",
        "post_norm": True,
        "embed_scale": 4.5,
        "logit_soft_cap": 3.0,
        "norm": NormConfig(1e-6, plus_one=True),
    },
    "gpt2": {
        "norm": NormConfig(1e-5, "layer", bias=True),
        "learned_positions": True,
        "ropes": (),
        "layer_ropes": (NO_ROPE, NO_ROPE),
        "qkv_bias": True,
        "o_bias": True,
        "mlp_bias": True,
        "gated_mlp": False,
        "activation": "gelu",
    },
    "cohere": {
        "norm": NormConfig(1e-5, "layer"),
        "parallel_residual": True,
        "shared_norm": True,
        "logit_scale": 0.25,
    },
    "granite": {"residual_scale": 0.22, "activation": "relu2", "gated_mlp": False},
    "half of a head turns": {"head_dim": 6, "ropes": (RopeConfig("default", 1e4, 4),)},
}

# Widths that lie on a grid.
GRID_SIZES = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16}
SCHEMES = {
    "w4a16": WeightGrid(4, 32, symmetric=True),
    "w8a16": WeightGrid(8, 0, symmetric=True),
    "w8a8-static": WeightGrid(8, 0, symmetric=True),
    "fp8_w8a8": WeightGrid(8, 0, symmetric=True, is_fp8=True),
}
STATIC_SCALES = {"w8a8-static": 0.04, "fp8_w8a8": 0.01}  # of activations


@dataclass(frozen=True)
class Model:
    step: StepGraph
    config: DecoderConfig
    read: ReadTensor


def plan_of(
    grid: WeightGrid, scheme: str, matrices: list[str], tensors: dict[str, NDArray[np.generic]]
) -> QuantPlan:
    if scheme == "w8a8-dynamic":
        return QuantPlan(
            weights=dict.fromkeys(matrices, grid), activation_groups=dict.fromkeys(matrices, 32)
        )
    if scheme not in STATIC_SCALES:
        return QuantPlan(dict.fromkeys(matrices, grid))
    scales = np.array([STATIC_SCALES[scheme]], np.float32)
    return QuantPlan(
        weights=dict.fromkeys(matrices, grid),
        activation_groups={name: tensors[name].shape[1] for name in matrices},
        static=frozenset(matrices),
        activation_scales=dict.fromkeys(matrices, scales),
    )


class RandomTensors:
    """Of a whole model, for the ranks to take their parts of."""

    def __init__(self, config: DecoderConfig) -> None:
        rng = np.random.default_rng(11)
        self.values = {
            name: (rng.standard_normal(shape) * 0.2).astype(np.float32)
            for name, shape in expected_tensors(config).items()
        }

    def shape(self, name: str) -> tuple[int, ...]:
        return self.values[name].shape

    def has_rows(self, name: str) -> bool:
        return True

    def read(self, name: str) -> NDArray[np.float32]:
        return self.values[name]

    def read_rows(self, name: str, begin: int, end: int) -> NDArray[np.float32]:
        return self.values[name][begin:end]

    def stored_grid(self, name: str) -> None:
        return None

    def read_codes(self, name: str, rows: tuple[int, int] | None = None) -> QuantisedMatrix:
        raise AssertionError(f"{name} isn't quantised")
