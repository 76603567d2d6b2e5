"""Run on the CPU the network that a step graph is lowered to."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from numpy.typing import NDArray

from llmbuild.builder.graph.materialise import ReadTensor
from llmbuild.builder.graph.step_graph import StepGraph
from llmbuild.builder.models.config import DecoderConfig
from llmbuild.builder.targets.tensorrt.emulation.module import EmulatedTensorRT
from llmbuild.builder.targets.tensorrt.emulation.network import EmulatedNetwork, Total
from llmbuild.builder.targets.tensorrt.emulation.plugins import (
    instantiate,
    plugin_layer,
    require_interpreter,
)
from llmbuild.builder.targets.tensorrt.limits import ActivationDtype, Limits
from llmbuild.builder.targets.tensorrt.lower import lower
from llmbuild.builder.targets.tensorrt.lowering import Lowering
from llmbuild.builder.targets.tensorrt.paged_limits import PagedLimits


@dataclass(frozen=True)
class Emulated:
    """A network that can be run. lowering: holds its weights' memory, too."""

    network: EmulatedNetwork
    lowering: Lowering

    def run(self, feeds: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
        """The outputs by name, caches' `.updated` among them, from the inputs by name; bf16 is
        ml_dtypes'. Raises InternalError for inputs of other names, dtypes or shapes."""
        return self.network.run(feeds)


def emulate(
    step: StepGraph,
    config: DecoderConfig,
    limits: Limits,
    activations: ActivationDtype,
    read: ReadTensor,
    total: Total = lambda part: part,
) -> Emulated:
    """The network that `build_plan` builds a plan of, made of the same arguments. total: what
    all_reduce gives for a rank's part, fp32.

    Every value has the dtype that it has in the network; sums are fp32, as in TensorRT's kernels,
    whose order of additions is their own. Raises BuildError for what the network refuses.
    """
    network = EmulatedNetwork(total)
    arguments = (step, config, limits, activations, read)
    return Emulated(network, lower(EmulatedTensorRT(), network, *arguments))


def emulate_paged(
    step: StepGraph,
    config: DecoderConfig,
    limits: PagedLimits,
    activations: ActivationDtype,
    read: ReadTensor,
    total: Total = lambda part: part,
) -> Emulated:
    """The same of `build_paged_plan`'s network, whose plugins Triton's interpreter runs: some
    milliseconds a program of a kernel. KV pools are memory of this process, given by its address.

    Raises BuildError where Triton doesn't interpret.
    """
    require_interpreter()
    return lower_to_emulation(step, config, limits, activations, read, total)


def lower_to_emulation(
    step: StepGraph,
    config: DecoderConfig,
    limits: PagedLimits,
    activations: ActivationDtype,
    read: ReadTensor,
    total: Total = lambda part: part,
) -> Emulated:
    """The same network, which can be run where Triton interprets alone. Raises BuildError, naming
    the node, for what our kernels can't express."""
    from llmbuild.builder.targets.tensorrt.lower_paged import lower_paged

    network = EmulatedNetwork(total, {"plugin_v3": plugin_layer})
    arguments = (step, config, limits, activations, read)
    return Emulated(network, lower_paged(EmulatedTensorRT(), network, *arguments, instantiate))
