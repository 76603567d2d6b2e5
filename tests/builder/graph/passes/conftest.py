"""Step graphs drawn by hand: the few nodes that a pass is to fuse, or to leave alone."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

from llmbuild.builder.graph.step_graph import StepGraph, Weight
from llmbuild.plugins.registry import DOMAIN, PLUGINS

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
def kinds() -> Callable[[StepGraph], list[str]]:
    """kinds(step): the graph's op types in order, after a sort that would refuse a cycle."""

    def of(step: StepGraph) -> list[str]:
        step.graph.sort()
        return [node.op_type for node in step.graph]

    return of
