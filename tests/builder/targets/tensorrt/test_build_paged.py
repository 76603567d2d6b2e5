"""How a plan with our plugins is built, with stand-ins for TensorRT's builder and for the compiling
of kernels."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from network_models import Model
from paged_steps import paged_limits
from stand_in_plugin import Definition, StandInPlugin, TensorDesc

from llmbuild.builder.targets.tensorrt import build_paged
from llmbuild.builder.targets.tensorrt.build_paged import build_paged_plan
from llmbuild.builder.targets.tensorrt.emulation.module import DataType, EmulatedTensorRT
from llmbuild.builder.targets.tensorrt.emulation.network import EmulatedNetwork
from llmbuild.builder.targets.tensorrt.emulation.tensors import Layer, Made, Tensor
from llmbuild.builder.targets.tensorrt.plugins import PluginRegistry
from llmbuild.errors import BuildError


def plugin_layer(
    layer: Layer, tensors: list[Tensor], shape_tensors: list[Tensor], definition: Definition
) -> Made:
    """Of what a registered plugin says of itself."""
    made = definition.describe(*(TensorDesc(each.sizes, each.dtype.name) for each in tensors))
    outputs = [Tensor(each.dtype, tuple(each.shape_expr)) for each in made]
    assert {type(each.dtype) for each in outputs} == {DataType}
    return Made(outputs, lambda *_: ())


class StandInTensorRT(EmulatedTensorRT):
    """A module whose builder records what it is asked for."""

    NetworkDefinitionCreationFlag = SimpleNamespace(STRONGLY_TYPED=0)
    QuickPluginCreationRequest = SimpleNamespace(STRICT_AOT="STRICT_AOT")

    class ILogger:
        Severity = SimpleNamespace(ERROR=1, INTERNAL_ERROR=0)

    def __init__(self) -> None:
        self.profiles: list[dict[str, Any]] = []
        self.loaded: list[bytes] = []
        self.plan: bytes | None = b"plan"

    def Builder(self, logger: Any) -> Any:
        self.network = EmulatedNetwork(more_layers={"plugin_v3": plugin_layer})
        cache = SimpleNamespace(serialize=lambda: b"timings")
        settings = SimpleNamespace(
            add_optimization_profile=self.profiles.append,
            create_timing_cache=lambda content: self.loaded.append(content) or cache,
            set_timing_cache=lambda given, ignore_mismatch: None,
            get_timing_cache=lambda: cache,
        )

        class Profile(dict[str, Any]):
            def set_shape(self, name: str, *shapes: Any) -> None:
                self[name] = shapes

        return SimpleNamespace(
            create_network=lambda flags: self.network,
            create_builder_config=lambda: settings,
            create_optimization_profile=Profile,
            build_serialized_network=lambda network, settings: self.plan,
        )


@pytest.fixture
def trt(monkeypatch: pytest.MonkeyPatch) -> StandInTensorRT:
    module = StandInTensorRT()
    monkeypatch.setattr(build_paged, "installed_tensorrt", lambda: (module, StandInPlugin()))
    monkeypatch.setattr(build_paged, "require_triton", lambda: None)  # which interprets here
    monkeypatch.setattr(PluginRegistry, "compile", lambda self, plugins: None)
    return module


def build(model: Model, timing_cache: Path | None = None) -> bytes:
    limits = paged_limits(model, "fp16", "int8")
    arguments = (model.step, model.config, limits, "fp16", model.read)
    return build_paged_plan(*arguments, timing_cache)  # type: ignore[arg-type]


def test_network_and_profiles_are_given_to_the_builder(
    trt: StandInTensorRT, model_of: Callable[..., Model]
) -> None:
    assert build(model_of()) == b"plan"
    assert list(trt.network.outputs) == ["logits"]
    assert len(trt.profiles) == 2
    assert all(profile.keys() == trt.network.inputs.keys() for profile in trt.profiles)


def test_timings_are_read_and_written(
    trt: StandInTensorRT, model_of: Callable[..., Model], tmp_path: Path
) -> None:
    cache = tmp_path / "timing.cache"
    for _ in range(2):
        build(model_of(), cache)
    assert trt.loaded == [b"", b"timings"]
    assert cache.read_bytes() == b"timings"


def test_a_plan_that_cannot_be_built_is_an_error(
    trt: StandInTensorRT, model_of: Callable[..., Model]
) -> None:
    trt.plan = None
    with pytest.raises(BuildError, match="TensorRT can't build the plan: TensorRT gave no reason"):
        build(model_of())
