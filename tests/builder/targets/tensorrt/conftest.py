"""Small random decoders, ready to be lowered."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from llmbuild.builder.graph.passes.rewrite import nodes_of
from llmbuild.builder.graph.pipeline import run_passes
from llmbuild.builder.graph.step_graph import StepGraph
from llmbuild.builder.models.config import DecoderConfig
from llmbuild.quant.grid import WeightGrid
from llmbuild.quant.plan import QuantPlan
from llmbuild.quant.reader import Tensor
from llmbuild.quant.rtn import round_to_nearest

sys.path.append(str(Path(__file__).parent))  # for network_models

from network_models import SCHEMES, Model, plan_of


@pytest.fixture(scope="session")
def model_of(
    decoder_config: Callable[..., DecoderConfig],
    traced: Callable[..., StepGraph],
    random_tensors: Callable[..., dict[str, NDArray[np.generic]]],
) -> Callable[..., Model]:
    """model_of(scheme="", grid=None, **overrides): a random decoder that went through the passes,
    every linear of it quantised by a key of SCHEMES, or on another grid."""

    def build(scheme: str = "", grid: WeightGrid | None = None, **overrides: Any) -> Model:
        step = traced(**overrides)
        tensors = random_tensors(step)
        matrices = [str(node.inputs[1].name) for node in nodes_of(step.graph, "linear")]
        plan = (
            plan_of(grid or SCHEMES[scheme], scheme, matrices, tensors) if scheme else QuantPlan()
        )
        run_passes(step, plan=plan)

        def read(name: str) -> Tensor:
            if name in plan.weights:
                return round_to_nearest(tensors[name], plan.weights[name])
            return tensors[name]

        return Model(step, decoder_config(**overrides), read)

    return build
