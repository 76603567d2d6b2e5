"""Build a plan for several GPUs with TensorRT for RTX, which needs no GPU for it."""

from collections.abc import Sequence
from typing import Any

from llmbuild.builder.graph.materialise import ReadTensor
from llmbuild.builder.graph.step_graph import StepGraph
from llmbuild.builder.models.config import DecoderConfig
from llmbuild.builder.targets.tensorrt.built_plan import (
    BuiltPlan,
    add_profiles,
    shapes_of,
    tensors_of,
)
from llmbuild.builder.targets.tensorrt.limits import ActivationDtype, Limits
from llmbuild.builder.targets.tensorrt.lower import lower
from llmbuild.builder.targets.tensorrt.profiles import profiles
from llmbuild.builder.targets.tensorrt.serialise import serialise
from llmbuild.errors import BuildError
from llmbuild.runtime.plan_header import CAPABILITY_BITS
from llmbuild.runtime.tensorrt_log import CollectedLog


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
    add_profiles(builder, settings, profiles(shapes_of(lowering.inputs), limits))
    plan = serialise(trt, builder, network, settings, log)
    return BuiltPlan(plan, tensors_of(trt, network))


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
