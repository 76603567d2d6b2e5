"""What the functions that lower operations to plugins share."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from llmbuild.builder.graph.materialise import ReadTensor
from llmbuild.builder.graph.step_graph import StepGraph
from llmbuild.builder.models.config import DecoderConfig
from llmbuild.builder.targets.tensorrt.limits import ActivationDtype
from llmbuild.builder.targets.tensorrt.lowering import Lowering, Tensor
from llmbuild.builder.targets.tensorrt.paged_limits import PagedLimits
from llmbuild.plugins.common.tensorrt_plugin import Plugin

# What a network's add_plugin_v3 takes for a plugin with its inputs.
Instantiate = Callable[[Plugin, Sequence[Tensor]], tuple[Any, ...]]


class PluginLowering(Lowering):
    """instantiate: as the TensorRT at hand does it."""

    target = "tensorrt"

    def __init__(
        self,
        trt: Any,
        network: Any,
        step: StepGraph,
        config: DecoderConfig,
        limits: PagedLimits,
        activations: ActivationDtype,
        read: ReadTensor,
        instantiate: Instantiate,
    ) -> None:
        super().__init__(trt, network, step, config, limits.plain, activations, read)
        self.paged, self.activations = limits, activations
        self.plugins: dict[str, Plugin] = {}  # by name
        self._instantiate = instantiate

    def plugin(self, plugin: Plugin, **inputs: Tensor) -> list[Tensor]:
        """The results of a new layer. inputs: by the kernel's names, whatever their order."""
        self.plugins[plugin.name] = plugin
        ordered = [inputs[name] for name in plugin.inputs]
        assert len(ordered) == len(inputs), f"{plugin.name} takes {list(plugin.inputs)}"
        layer = self.layer("plugin_v3", *self._instantiate(plugin, ordered))
        return [layer.get_output(index) for index in range(len(plugin.outputs))]

    def fp32(self, value: ir.Value | None) -> Tensor:
        """A vector's values; one tensor, however many read it."""

        def make() -> Tensor:
            return self.constant(self.values(value).astype(np.float32).reshape(-1))

        return self.once(("fp32", value), make)

    def optional_fp32(self, **values: ir.Value | None) -> dict[str, Tensor]:
        """Those that are there."""
        return {name: self.fp32(value) for name, value in values.items() if value is not None}
