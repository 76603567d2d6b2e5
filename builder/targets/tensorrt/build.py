"""Build a plan for several GPUs with TensorRT for RTX, which needs no GPU for it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from llmbuild.builder.graph.materialise import ReadTensor
from llmbuild.builder.graph.step_graph import NEXT_HIDDEN, OUTPUT, StepGraph
from llmbuild.builder.models.config import DecoderConfig
from llmbuild.builder.targets.tensorrt.limits import ActivationDtype, Limits
from llmbuild.builder.targets.tensorrt.lower import lower
from llmbuild.builder.targets.tensorrt.profiles import profiles
from llmbuild.errors import BuildError
from llmbuild.runtime.plan_header import CAPABILITY_BITS
from llmbuild.runtime.target import PlanTensor
from llmbuild.runtime.tensorrt_log import CollectedLog

_FIRST_SIZES = {OUTPUT: "R", NEXT_HIDDEN: "T"}


@dataclass(frozen=True)
class BuiltPlan:
    """A serialised plan, and its inputs and outputs."""

    content: bytes
    tensors: list[PlanTensor]


def build_plan(
    step: StepGraph,
    config: DecoderConfig,
    limits: Limits,
    activations: ActivationDtype,
    read: ReadTensor,
    capabilities: Sequence[str],
) -> BuiltPlan:
    """The plan of a step graph that went through the passes.

    config: that of the graph's shard. capabilities: compute capabilities to build for, such as 8.9.
    Raises BuildError where TensorRT isn't installed, and for what it can't build, with the layer.
    """
    trt = installed_tensorrt_rtx()
    _check_capabilities(capabilities)
    log = CollectedLog(trt)
    builder = trt.Builder(log.logger)
    flags = 1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED)
    network = builder.create_network(flags)
    try:
        lowering = lower(trt, network, step, config, limits, activations, read)
    except BuildError as error:
        raise BuildError(f"{error}: {log.text()}" if log.errors else str(error)) from error
    settings = builder.create_builder_config()
    settings.set_flag(trt.BuilderFlag.REQUIRE_USER_ALLOCATION)  # CUDA graphs are captured of it
    settings.num_compute_capabilities = len(capabilities)
    for index, capability in enumerate(capabilities):
        settings.set_compute_capability(_named(trt, capability), index)
    _add_profiles(builder, settings, lowering.inputs, limits)
    plan = builder.build_serialized_network(network, settings)
    if plan is None:
        raise BuildError(f"TensorRT can't build the plan: {log.text()}")
    return BuiltPlan(bytes(plan), _tensors(trt, network))


def _tensors(trt: Any, network: Any) -> list[PlanTensor]:
    dtypes = {trt.int32: "int32", trt.float16: "fp16", trt.bfloat16: "bf16", trt.float32: "fp32"}
    inputs = [network.get_input(index) for index in range(network.num_inputs)]
    outputs = [network.get_output(index) for index in range(network.num_outputs)]
    tensors = []
    for tensor in (*inputs, *outputs):
        first = _FIRST_SIZES.get(tensor.name, "B")  # of an output, whose other sizes are numbers
        shape = [
            size if size >= 0 else (tensor.get_dimension_name(axis) or first)
            for axis, size in enumerate(tensor.shape)
        ]
        dtype = dtypes[tensor.dtype]
        tensors.append(
            PlanTensor(name=tensor.name, dtype=dtype, shape=shape, is_input=tensor.is_network_input)
        )
    return tensors


def installed_tensorrt_rtx() -> Any:
    """The module. Raises BuildError where it isn't installed."""
    try:
        import tensorrt_rtx
    except ImportError as error:
        raise BuildError(
            f"the tensorrt-rtx target needs TensorRT for RTX ({error}); "
            "`pip install '.[build,tensorrt-rtx]'` in llmbuild's checkout has it"
        ) from error
    return tensorrt_rtx


def _check_capabilities(capabilities: Sequence[str]) -> None:
    unknown = [each for each in capabilities if each not in CAPABILITY_BITS]
    if unknown or not capabilities:
        known, given = ", ".join(CAPABILITY_BITS), ", ".join(unknown) or "none"
        raise BuildError(f"TensorRT for RTX builds for compute capabilities {known}, not {given}")


def _named(trt: Any, capability: str) -> Any:
    return getattr(trt.ComputeCapability, f"SM{capability.replace('.', '')}")


def _add_profiles(builder: Any, settings: Any, inputs: dict[str, Any], limits: Limits) -> None:
    shapes = {name: tuple(tensor.shape) for name, tensor in inputs.items()}
    for ranges in profiles(shapes, limits):
        profile = builder.create_optimization_profile()
        for name, sizes in ranges.items():
            profile.set_shape(name, sizes.least, sizes.best, sizes.most)
        settings.add_optimization_profile(profile)
