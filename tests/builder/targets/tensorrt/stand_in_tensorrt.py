"""Stands for TensorRT's module where a plan with plugins is built: it records what its builder is
asked for, and checks the network as it grows."""

from types import SimpleNamespace
from typing import Any

from stand_in_plugin import Definition, TensorDesc

from llmbuild.builder.targets.tensorrt.emulation.module import DataType, EmulatedTensorRT
from llmbuild.builder.targets.tensorrt.emulation.network import EmulatedNetwork
from llmbuild.builder.targets.tensorrt.emulation.tensors import Layer, Made, Tensor


def plugin_layer(
    layer: Layer, tensors: list[Tensor], shape_tensors: list[Tensor], definition: Definition
) -> Made:
    """Of what a registered plugin says of itself."""
    made = definition.describe(*(TensorDesc(each.sizes, each.dtype.name) for each in tensors))
    outputs = [Tensor(each.dtype, tuple(each.shape_expr)) for each in made]
    assert {type(each.dtype) for each in outputs} == {DataType}
    return Made(outputs, lambda *_: ())


class StandInNetwork(EmulatedNetwork):
    """Tells its inputs and outputs as TensorRT does."""

    @property
    def num_inputs(self) -> int:
        return len(self.inputs)

    @property
    def num_outputs(self) -> int:
        return len(self.outputs)

    def get_input(self, index: int) -> Any:
        return _told([*self.inputs.values()][index])

    def get_output(self, index: int) -> Any:
        return _told([*self.outputs.values()][index])


def _told(tensor: Tensor) -> Any:
    return SimpleNamespace(
        name=tensor.name,
        dtype=tensor.dtype,
        shape=tensor.shape,
        is_network_input=tensor.is_input,
        get_dimension_name=lambda axis: str(tensor.sizes[axis]),
    )


class StandInTensorRT(EmulatedTensorRT):
    """A module whose builder records what it is asked for."""

    NetworkDefinitionCreationFlag = SimpleNamespace(STRONGLY_TYPED=0)
    __version__ = "11.4.0.106"
    QuickPluginCreationRequest = SimpleNamespace(STRICT_AOT="STRICT_AOT")

    class ILogger:
        Severity = SimpleNamespace(ERROR=1, INTERNAL_ERROR=0)

    def __init__(self) -> None:
        self.profiles: list[dict[str, Any]] = []
        self.loaded: list[bytes] = []
        self.plan: bytes | None = b"plan"

    def Builder(self, logger: Any) -> Any:
        self.network = StandInNetwork(more_layers={"plugin_v3": plugin_layer})
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
