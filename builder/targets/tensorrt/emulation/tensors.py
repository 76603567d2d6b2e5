"""Tensors and layers of an emulated network."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from llmbuild.builder.targets.tensorrt.emulation.module import TORCH_TYPES, DataType
from llmbuild.builder.targets.tensorrt.emulation.sizes import Size, Sizes, named
from llmbuild.errors import BuildError


class Tensor:
    """value: a constant's. numbers: what a tensor that tells sizes will hold, where it is known."""

    def __init__(
        self,
        dtype: DataType,
        sizes: Sizes,
        name: str = "",
        is_input: bool = False,
        numbers: Sizes | None = None,
    ) -> None:
        self.dtype, self.sizes, self.name = dtype, sizes, name
        self.is_input, self.numbers = is_input, numbers
        self.value: torch.Tensor | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """As TensorRT tells it: -1 where a run decides."""
        return tuple(size if isinstance(size, int) else -1 for size in self.sizes)

    def set_dimension_name(self, axis: int, name: str) -> None:
        """Sizes of one name are equal."""
        self.sizes = (*self.sizes[:axis], named(name), *self.sizes[axis + 1 :])

    def of(self, values: Mapping["Tensor", torch.Tensor]) -> torch.Tensor:
        """In a run."""
        return values[self] if self.value is None else self.value


@dataclass(frozen=True)
class Made:
    """What a layer gives: its results, and how they are computed, in any dtype, of its inputs."""

    outputs: Sequence[Tensor]
    compute: Callable[..., torch.Tensor | tuple[torch.Tensor, ...]]


MakeLayer = Callable[..., Made]  # of the layer, and what it was added with


class Layer:
    """Checked when its first result is asked for, as attributes come after its making; computed at
    once if it depends on constants alone."""

    def __init__(
        self,
        kind: str,
        arguments: Sequence[Any],
        make: MakeLayer,
        on_made: Callable[["Layer"], None],
    ) -> None:
        self.kind, self.name = kind, ""
        first = arguments[0] if arguments else None
        tensors = first if isinstance(first, list) else arguments
        own = [each for each in tensors if isinstance(each, Tensor)]
        self.inputs: dict[int, Tensor] = dict(enumerate(own))
        self._arguments, self._make, self._on_made = arguments, make, on_made
        self._made: Made | None = None

    def set_input(self, index: int, tensor: Tensor) -> None:
        self.inputs[index] = tensor

    def get_output(self, index: int) -> Tensor:
        if self._made is None:
            self._made = self._make(self, *self._arguments)
            if all(tensor.value is not None for tensor in self.inputs.values()):
                for tensor, value in zip(self.outputs, self.run({}), strict=True):
                    tensor.value = value
            else:
                self._on_made(self)
        return self._made.outputs[index]

    @property
    def outputs(self) -> Sequence[Tensor]:
        assert self._made is not None
        return self._made.outputs

    def run(self, values: Mapping[Tensor, torch.Tensor]) -> list[torch.Tensor]:
        """The results of its inputs' values, rounded to their dtypes."""
        assert self._made is not None
        results = self._made.compute(*(tensor.of(values) for tensor in self.inputs.values()))
        results = (results,) if isinstance(results, torch.Tensor) else results
        return [
            result.to(TORCH_TYPES[tensor.dtype])
            for tensor, result in zip(self._made.outputs, results, strict=True)
        ]

    def require(self, condition: bool, problem: str) -> None:
        """Raises BuildError, naming the layer, as TensorRT refuses it."""
        if not condition:
            raise BuildError(f"TensorRT refuses layer {self.name or self.kind}: {problem}")

    def require_same_dtype(self, *tensors: Tensor) -> None:
        dtypes = [tensor.dtype.value for tensor in tensors]
        self.require(len(set(dtypes)) == 1, f"dtypes {', '.join(dtypes)} differ")

    def require_float(self, tensor: Tensor) -> None:
        self.require(tensor.dtype.is_float, f"{tensor.dtype.value} isn't a floating-point type")

    def common(self, left: Size, right: Size) -> Size:
        """The size of two that have to be equal. What only a run can tell is left to it."""
        if isinstance(left, int) and isinstance(right, int):
            self.require(left == right, f"sizes {left} and {right} differ")
        return right if isinstance(right, int) else left
