"""A strongly typed network that is checked while it grows, and run as often as wanted."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from llmbuild.builder.targets.tensorrt.emulation.attention_layers import ATTENTION_LAYERS
from llmbuild.builder.targets.tensorrt.emulation.layers import LAYERS, dist_collective
from llmbuild.builder.targets.tensorrt.emulation.module import (
    TORCH_TYPES,
    DataType,
    to_numpy,
    to_torch,
)
from llmbuild.builder.targets.tensorrt.emulation.sizes import evaluate, named
from llmbuild.builder.targets.tensorrt.emulation.tensors import Layer, MakeLayer, Tensor
from llmbuild.errors import InternalError

Total = Callable[[NDArray[np.float32]], NDArray[np.float32]]


@dataclass
class EmulatedNetwork:
    """Made as TensorRT's is, by add_* calls. A layer is checked for the dtypes and shapes that a
    strongly typed network asks for, as soon as its result is asked for.

    total: what all_reduce gives for a rank's part. more_layers: what add_<kind> makes, beyond
    TensorRT's own.
    """

    total: Total = lambda part: part
    more_layers: Mapping[str, MakeLayer] = field(default_factory=dict)
    layers: list[Layer] = field(default_factory=list)
    inputs: dict[str, Tensor] = field(default_factory=dict)
    outputs: dict[str, Tensor] = field(default_factory=dict)
    _order: list[Layer] = field(default_factory=list)  # those that depend on inputs, as they run

    def __getattr__(self, name: str) -> Callable[..., Layer]:
        """add_<kind>"""
        kind = name.removeprefix("add_")
        makers = LAYERS | ATTENTION_LAYERS
        makers |= {"dist_collective": partial(dist_collective, self.total), **self.more_layers}
        if not name.startswith("add_") or kind not in makers:
            raise AttributeError(name)

        def add(*arguments: Any) -> Layer:
            layer = Layer(kind, arguments, makers[kind], self._order.append)
            self.layers.append(layer)
            return layer

        return add

    def add_input(self, name: str, dtype: DataType, shape: Sequence[int]) -> Tensor:
        """-1: a size that a run decides, whose name is the input's unless it gets one."""
        sizes = tuple(
            named(f"{name}[{axis}]") if size == -1 else size for axis, size in enumerate(shape)
        )
        self.inputs[name] = Tensor(dtype, sizes, name, is_input=True)
        return self.inputs[name]

    def mark_output(self, tensor: Tensor) -> None:
        assert tensor.name not in self.outputs
        self.outputs[tensor.name] = tensor

    def run(self, feeds: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
        """The outputs by name. Feeds are checked, and every layer's result is held to the sizes
        that were told for it when it was added."""
        values = self._values(feeds)
        given = self._named_sizes(values)
        order = self._needed()
        uses = Counter(self.outputs.values())
        for layer in order:
            uses.update(layer.inputs.values())
        with torch.no_grad():
            for layer in order:
                results = layer.run(values)
                for tensor, result in zip(layer.outputs, results, strict=True):
                    _check_sizes(layer, tensor, result, given)
                    values[tensor] = result
                _drop(values, layer.inputs.values(), uses)
        return {name: to_numpy(tensor.of(values)) for name, tensor in self.outputs.items()}

    def _needed(self) -> list[Layer]:
        """The layers that outputs depend on, as they run; TensorRT drops others, too."""
        read = set(self.outputs.values())
        needed = []
        for layer in reversed(self._order):
            if not read.isdisjoint(layer.outputs):
                read.update(layer.inputs.values())
                needed.append(layer)
        return needed[::-1]

    def _values(self, feeds: Mapping[str, NDArray[Any]]) -> dict[Tensor, torch.Tensor]:
        if feeds.keys() != self.inputs.keys():
            wrong = sorted(feeds.keys() ^ self.inputs.keys())
            raise InternalError(f"inputs that are missing, or unknown: {', '.join(wrong)}")
        return {tensor: to_torch(feeds[name]) for name, tensor in self.inputs.items()}

    def _named_sizes(self, values: Mapping[Tensor, torch.Tensor]) -> dict[str, int]:
        """What a run's inputs give for them. Raises InternalError where they contradict it."""
        given: dict[str, int] = {}
        for tensor, value in values.items():
            for size, actual in zip(tensor.sizes, value.shape, strict=False):
                given |= {} if isinstance(size, int) else {str(size): actual}
        for tensor, value in values.items():
            sizes = tuple(evaluate(size, given) for size in tensor.sizes)
            if tuple(value.shape) != sizes or value.dtype != TORCH_TYPES[tensor.dtype]:
                raise InternalError(
                    f"input {tensor.name} is {value.dtype} {list(value.shape)}, not "
                    f"{tensor.dtype.value} {list(sizes)}"
                )
        return given


def _check_sizes(
    layer: Layer, tensor: Tensor, result: torch.Tensor, given: Mapping[str, int]
) -> None:
    sizes = tuple(evaluate(size, given) for size in tensor.sizes)
    if tuple(result.shape) != sizes:
        raise InternalError(f"{layer.name} gives {list(result.shape)}, not {list(sizes)}")


def _drop(
    values: dict[Tensor, torch.Tensor], read: Iterable[Tensor], uses: Counter[Tensor]
) -> None:
    for tensor in read:
        uses[tensor] -= 1
        if not uses[tensor]:
            values.pop(tensor, None)
