"""Small decoders as configs and as step graphs, and step graphs drawn by hand, for the tests of
what makes engines of them."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import ml_dtypes
import numpy as np
import onnx_ir as ir
import pytest
from numpy.typing import NDArray

from llmbuild.builder.graph.pipeline import run_passes
from llmbuild.builder.graph.step_graph import StepGraph, Weight
from llmbuild.builder.graph.trace import trace
from llmbuild.builder.models.config import DecoderConfig, NormConfig, RopeConfig
from llmbuild.plugins.registry import DOMAIN, PLUGINS
from llmbuild.runtime.manifest import KVLayer, KVLayout

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
    if len(shape) > 1:
        values *= np.float32(1.5 * shape[-1] ** -0.5)
        return values.astype(ml_dtypes.bfloat16).astype(np.float32)
    return np.float32(name.endswith("norm.weight")) + np.float32(0.3) * values


TYPES = {
    "fp32": ir.DataType.FLOAT,
    "bf16": ir.DataType.BFLOAT16,
    "int32": ir.DataType.INT32,
    "int64": ir.DataType.INT64,
}
Shape = Sequence[int | str]


class Sketch:
    """Grows a graph by one value or node a call, and hands it out as a step graph."""

    def __init__(self) -> None:
        self._inputs: list[ir.Value] = []
        self._weights: dict[str, tuple[ir.Value, Weight]] = {}
        self._nodes: list[ir.Node] = []

    def input(self, name: str, shape: Shape, dtype: str = "fp32") -> ir.Value:
        self._inputs.append(self._value(name, shape, dtype))
        return self._inputs[-1]

    def weight(self, name: str, shape: tuple[int, ...], dtype: str = "fp32") -> ir.Value:
        value = self._value(name, shape, dtype)
        self._weights[name] = value, Weight((name,), shape, dtype)
        return value

    def node(
        self,
        kind: str,
        inputs: Sequence[ir.Value | None],
        *shapes: Shape,
        dtype: str = "fp32",
        attributes: Mapping[str, Any] | None = None,
    ) -> Any:
        """A node of our domain when the plugins have its kind, else a standard one; its output,
        or a list of them when several shapes are given."""
        domain = DOMAIN if kind in PLUGINS else ""
        node = ir.node(kind, list(inputs), attributes, domain=domain, num_outputs=len(shapes))
        for index, (output, shape) in enumerate(zip(node.outputs, shapes, strict=True)):
            output.name = f"{kind}_{len(self._nodes)}_{index}"
            output.shape, output.dtype = ir.Shape(shape), TYPES[dtype]
        self._nodes.append(node)
        return node.outputs[0] if len(shapes) == 1 else list(node.outputs)

    def step(self, *outputs: ir.Value) -> StepGraph:
        graph = ir.Graph(
            self._inputs,
            outputs,
            nodes=self._nodes,
            initializers=[value for value, _ in self._weights.values()],
            opset_imports={"": 20, DOMAIN: 1},
        )
        constants: dict[str, np.ndarray] = {}
        weights = {name: weight for name, (_, weight) in self._weights.items()}
        return StepGraph(ir.Model(graph, ir_version=10), weights, constants)

    @staticmethod
    def _value(name: str, shape: Shape, dtype: str) -> ir.Value:
        return ir.Value(name=name, shape=ir.Shape(shape), type=ir.TensorType(TYPES[dtype]))


@pytest.fixture
def sketch() -> Sketch:
    return Sketch()


@pytest.fixture(scope="session")
def kv_layout() -> Callable[..., KVLayout]:
    """kv_layout(config, *pairs, block_size=4): KV heads of these dtypes, a pair (K, V) for each
    head in turn; one pair is that of all heads, and no pair is fp32."""

    def layout(config: DecoderConfig, *pairs: tuple[str, str], block_size: int = 4) -> KVLayout:
        pairs = pairs or (("fp32", "fp32"),)
        heads = pairs if len(pairs) > 1 else pairs * config.num_kv_heads
        return KVLayout(
            block_size=block_size,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            layers=[KVLayer.of_heads(heads)] * config.num_layers,
        )

    return layout
