"""Runs TensorRT plugins in Triton's interpreter as TensorRT would launch them, and evaluates what
they derive from shapes with symbols, too. Import triton_harness before a module with kernels."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
import triton_harness  # noqa: F401 - it makes Triton interpret

from llmbuild.builder.targets.tensorrt.emulation.plugins import run_plugin
from llmbuild.plugins.common.tensorrt_plugin import Plugin, Shapes, arguments


class Symbol:
    """A size as TensorRT's plugins see it: arithmetic with ints and symbols on its right."""

    def __init__(self, value: Callable[[], int]) -> None:
        self.value = value

    def __add__(self, other: "int | Symbol") -> "Symbol":
        return Symbol(lambda: self.value() + value_of(other))

    def __sub__(self, other: "int | Symbol") -> "Symbol":
        return Symbol(lambda: self.value() - value_of(other))

    def __mul__(self, other: "int | Symbol") -> "Symbol":
        return Symbol(lambda: self.value() * value_of(other))

    def __floordiv__(self, other: "int | Symbol") -> "Symbol":
        return Symbol(lambda: self.value() // value_of(other))


def value_of(size: Any) -> int:
    return size.value() if isinstance(size, Symbol) else size


def values_of(sizes: Any) -> tuple[int, ...]:
    return tuple(value_of(size) for size in sizes)


def check_launches(plugin: Plugin, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """The same sizes come of symbols, and arguments stand as a plugin's have to."""

    def symbol(size: int) -> Symbol:
        return Symbol(lambda: size)

    symbols: Shapes = {name: tuple(map(symbol, shape)) for name, shape in shapes.items()}
    expected = {name: values_of(shape) for name, shape in plugin.output_shapes(shapes).items()}
    made = {name: values_of(shape) for name, shape in plugin.output_shapes(symbols).items()}
    assert made == expected
    assert list(made) == list(plugin.outputs)
    for tactic in plugin.tactics:
        launch, symbolic = tactic.launch(shapes), tactic.launch(symbols)
        assert values_of(symbolic.grid) == values_of(launch.grid)
        assert values_of(symbolic.integers.values()) == values_of(launch.integers.values())
        kinds = [tactic.variant.signature[name][0] == "*" for name in arguments(plugin, tactic)]
        inputs, outputs = len(plugin.inputs), len(plugin.outputs)
        assert kinds == [True] * inputs + [False] * len(launch.integers) + [True] * outputs


def run(plugin: Plugin, tactic: int = 0, **inputs: torch.Tensor | None) -> list[torch.Tensor]:
    """The outputs. inputs: by name, None for what isn't there; bytes are int8."""
    given = {name: value for name, value in inputs.items() if value is not None}
    assert given.keys() == plugin.inputs.keys()
    ordered = [given[name].contiguous() for name in plugin.inputs]
    check_launches(plugin, {name: tuple(given[name].shape) for name in plugin.inputs})
    return list(run_plugin(plugin, plugin.tactics[tactic], ordered))
