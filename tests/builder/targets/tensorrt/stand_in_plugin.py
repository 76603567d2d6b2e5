"""What of tensorrt.plugin our plugins use, held to what TensorRT asks of a plugin's functions."""

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import GenericAlias, SimpleNamespace
from typing import Any


@dataclass
class TensorDesc:
    shape_expr: Sequence[Any]
    dtype: str


@dataclass
class AutoTuneCombination:
    types: str
    layout: str
    tactics: list[int]


@dataclass
class KernelLaunchParams:
    grid_x: Any = 1
    grid_y: Any = 1
    grid_z: Any = 1
    block_x: int = 1
    shared_mem: int = 0


@dataclass
class SymInt32:
    value: Any


class SymIntExprs(list[Any]):
    def __init__(self, count: int) -> None:
        super().__init__([None] * count)


@dataclass
class Definition:
    """A plugin; called with a network's tensors it gives a function that makes, of what kind of
    kernel is wanted, what add_plugin_v3 takes."""

    inputs: list[str]
    num_outputs: int
    describe: Callable[..., Any]
    autotune: Callable[..., Any] | None = None
    implement: Callable[..., Any] | None = None

    def __call__(self, *tensors: Any) -> Callable[[str], tuple[list[Any], list[Any], Any]]:
        assert len(tensors) == len(self.inputs)

        def create(request: str) -> tuple[list[Any], list[Any], Any]:
            assert request == "STRICT_AOT"
            return list(tensors), [], self

        return create


@dataclass
class StandInPlugin:
    """Stands for the module."""

    op: SimpleNamespace = field(default_factory=SimpleNamespace)
    TensorDesc = TensorDesc
    AutoTuneCombination = AutoTuneCombination
    KernelLaunchParams = KernelLaunchParams
    SymInt32 = SymInt32
    SymIntExprs = SymIntExprs

    def from_shape_expr(self, shape: tuple[Any, ...], dtype: str) -> TensorDesc:
        assert isinstance(shape, tuple)
        return TensorDesc(shape, dtype)

    def register(self, identity: str) -> Callable[[Callable[..., Any]], None]:
        namespace, name = identity.split("::")
        assert "." not in identity

        def decorate(function: Callable[..., Any]) -> None:
            signature = inspect.signature(function)
            for parameter in signature.parameters.values():
                assert parameter.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD
                assert parameter.annotation is TensorDesc
            results = signature.return_annotation
            assert isinstance(results, GenericAlias)
            assert results.__origin__ is tuple
            assert {*results.__args__} == {TensorDesc}
            if not hasattr(self.op, namespace):
                setattr(self.op, namespace, SimpleNamespace())
            assert not hasattr(getattr(self.op, namespace), name), "registered twice"
            made = Definition([*signature.parameters], len(results.__args__), function)
            setattr(getattr(self.op, namespace), name, made)

        return decorate

    def autotune(self, identity: str) -> Callable[[Callable[..., Any]], None]:
        def decorate(function: Callable[..., Any]) -> None:
            made = self.definition(identity)
            assert [*inspect.signature(function).parameters] == [*made.inputs, "outputs"]
            made.autotune = function

        return decorate

    def aot_impl(self, identity: str) -> Callable[[Callable[..., Any]], None]:
        def decorate(function: Callable[..., Any]) -> None:
            made, signature = self.definition(identity), inspect.signature(function)
            assert [*signature.parameters] == [*made.inputs, "outputs", "tactic"]
            expected = tuple[str, str, KernelLaunchParams, SymIntExprs]
            assert signature.return_annotation == expected
            made.implement = function

        return decorate

    def definition(self, identity: str) -> Definition:
        namespace, name = identity.split("::")
        found = getattr(getattr(self.op, namespace), name)
        assert isinstance(found, Definition)
        return found
