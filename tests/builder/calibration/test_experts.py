"""Calibrated experts: each is rounded for the tokens that are routed to it."""

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from llmbuild.builder.calibration.batch import calibration_batch, fp32_pools
from llmbuild.builder.calibration.store import TensorStore
from llmbuild.builder.calibration.weights import calibrate_weights
from llmbuild.builder.graph.reference import running
from llmbuild.builder.graph.step_graph import StepGraph
from llmbuild.builder.models.config import DecoderConfig, MoeConfig
from llmbuild.plugins.common.kv_pools import bind_kv_pools
from llmbuild.quant.gptq import gptq
from llmbuild.quant.grid import QuantisedMatrix, WeightGrid
from llmbuild.quant.moments import FactoredMoments
from llmbuild.quant.plan import QuantPlan
from llmbuild.quant.rtn import round_to_nearest

EXPERTS, SIZE = 6, 64
VARIANT: dict[str, Any] = {
    "hidden_size": 64,
    "num_layers": 1,
    "windows": (0,),
    "layer_ropes": (0,),
    "moe": MoeConfig(EXPERTS, 2, SIZE, normalise=True),
    "moe_layers": (True,),
}
GATE_UP, DOWN = "layers.0.mlp.experts.gate_up", "layers.0.mlp.experts.down"
ROUTER = "layers.0.mlp.router.weight"
GRID = WeightGrid(4, 32, True)
TOKENS = np.random.default_rng(5).integers(0, 37, (6, 40)).astype(np.int32)
Tensors = dict[str, NDArray[np.generic]]


class Calibrated:
    """A mixture whose experts calibration rounded by a method."""

    def __init__(
        self, step: StepGraph, config: DecoderConfig, tensors: Tensors, root: Path, method: Any
    ) -> None:
        self.step, self.config, self.tensors = step, config, tensors
        names = (GATE_UP, DOWN)
        plan = QuantPlan(dict.fromkeys(names, GRID), methods=dict.fromkeys(names, method))
        self.store = TensorStore(root, plan.weights)
        arguments = (plan, tensors.__getitem__, TOKENS, self.store, lambda _: None)
        calibrate_weights(step, config, *arguments)

    def matrix(self, name: str) -> QuantisedMatrix:
        found = self.store.get(name)
        assert isinstance(found, QuantisedMatrix)
        return found

    def slots(self) -> tuple[NDArray[np.float64], list[int]]:
        """What gate and up read, and where each expert's begins."""
        with bind_kv_pools(fp32_pools(self.config, TOKENS.shape)), torch.no_grad():
            batch = calibration_batch(TOKENS)
            for node, values in running(self.step, self.tensors.__getitem__, batch):
                if node.op_type == "moe_linear":
                    x, _, starts = (values.get(value) for value in node.inputs if value)
                    assert x is not None
                    assert starts is not None
                    return x.numpy().astype(np.float64), starts.tolist()
        raise AssertionError("no expert")


@pytest.fixture
def calibrated(
    traced: Callable[..., StepGraph],
    decoder_config: Callable[..., DecoderConfig],
    random_tensors: Callable[[StepGraph], Tensors],
    tmp_path: Path,
) -> Callable[..., Calibrated]:
    """calibrated(method, with_idle=False): whether experts 2 and 5 are never chosen."""

    def build(method: str, with_idle: bool = False) -> Calibrated:
        step = traced(**VARIANT)
        tensors = random_tensors(step)
        if with_idle:  # two of the others are above zero for any token, and these are zero
            router = tensors[ROUTER]
            tensors[ROUTER] = np.stack([router[0], -router[0], 0 * router[0]] * 2)
            tensors[ROUTER][3:] = np.roll(tensors[ROUTER][3:], 1, axis=1)
        return Calibrated(step, decoder_config(**VARIANT), tensors, tmp_path / method, method)

    return build


def errors(it: Calibrated, matrix: QuantisedMatrix) -> list[float]:
    """Of gate and up, each expert's products with its own tokens."""
    x, starts = it.slots()
    exact, rounded = it.tensors[GATE_UP].astype(np.float64), matrix.dequantised()
    return [
        float(np.square(x[begin:end] @ (rounded[e] - exact[e]).T).sum())
        for e, (begin, end) in enumerate(pairwise(starts))
    ]


@pytest.mark.parametrize("method", ["gptq", "awq"])
def test_every_expert_loses_less_of_its_own_products_than_rounded_to_nearest(
    calibrated: Callable[..., Calibrated], method: str
) -> None:
    it = calibrated(method)
    matrix = it.matrix(GATE_UP)
    nearest = round_to_nearest(it.tensors[GATE_UP], GRID)
    pairs = list(zip(errors(it, matrix), errors(it, nearest), strict=True))
    assert all(own < other for own, other in pairs)
    assert sum(own for own, _ in pairs) < 0.8 * sum(other for _, other in pairs)
    assert it.matrix(DOWN).shape == (EXPERTS, 64, SIZE)
    assert 0 < it.store.losses[GATE_UP] < 0.05


def test_another_experts_tokens_are_not_what_it_is_rounded_for(
    calibrated: Callable[..., Calibrated],
) -> None:
    """Codes of an expert are other than those that the tokens of all experts together give."""
    it = calibrated("gptq")
    x, _ = it.slots()
    whole = FactoredMoments.of(torch.from_numpy((x.T @ x / len(x)).astype(np.float32)))
    for expert in range(EXPERTS):
        shared = gptq(it.tensors[GATE_UP][expert], whole, GRID)
        assert (shared.codes != it.matrix(GATE_UP).codes[expert]).any()


def test_an_expert_without_tokens_borrows_them_for_gate_and_up_and_has_none_for_down(
    calibrated: Callable[..., Calibrated],
) -> None:
    it = calibrated("gptq", with_idle=True)
    x, starts = it.slots()
    for expert in (2, 5):
        assert starts[expert] == starts[expert + 1]
        lost = {}
        for name, inputs in ((GATE_UP, x), (DOWN, np.eye(SIZE))):
            exact = it.tensors[name][expert]
            nearest = round_to_nearest(exact, GRID)
            for kind, matrix in {
                "own": it.matrix(name).take_rows(expert),
                "nearest": nearest,
            }.items():
                error = inputs @ (matrix.dequantised() - exact).T
                lost[name, kind] = float(np.square(error).sum())
        assert lost[GATE_UP, "own"] < 0.8 * lost[GATE_UP, "nearest"]
        assert lost[DOWN, "own"] < 1.1 * lost[DOWN, "nearest"]
