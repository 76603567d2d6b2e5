"""Build a plan with our plugins, for the GPU at hand. Untried: no machine here has one."""

from pathlib import Path
from typing import Any

from llmbuild.builder.graph.materialise import ReadTensor
from llmbuild.builder.graph.step_graph import StepGraph
from llmbuild.builder.models.config import DecoderConfig
from llmbuild.builder.targets.gpu.triton_compiler import require_triton
from llmbuild.builder.targets.tensorrt.built_plan import (
    BuiltPlan,
    add_profiles,
    shapes_of,
    tensors_of,
)
from llmbuild.builder.targets.tensorrt.limits import ActivationDtype
from llmbuild.builder.targets.tensorrt.paged_limits import PagedLimits
from llmbuild.builder.targets.tensorrt.paged_profiles import paged_profiles
from llmbuild.builder.targets.tensorrt.plugins import PluginRegistry
from llmbuild.builder.targets.tensorrt.serialise import serialise
from llmbuild.errors import BuildError
from llmbuild.runtime.tensorrt_log import CollectedLog

_FIRST_MAJOR = 11
_INSTALL = (
    "install TensorRT 11 or newer: `pip install '.[build,tensorrt]'` in llmbuild's checkout has it "
    "(tensorrt-cu13, of 11.1 or newer; 10.14 breaks plugins that are compiled ahead of time, and "
    "other releases before 11 are untried), on a machine with the kind of GPU that will serve. "
    "Without a GPU choose target tensorrt-rtx, or cpu"
)


def build_paged_plan(
    step: StepGraph,
    config: DecoderConfig,
    limits: PagedLimits,
    activations: ActivationDtype,
    read: ReadTensor,
    timing_cache: Path | None = None,
) -> BuiltPlan:
    """The plan of a step graph that went through the passes, for one compute capability: that of
    `limits`, which the GPU at hand must have.

    config: that of the graph's shard. timing_cache: a file that keeps what TensorRT timed, read if
    it is there and written anew. Raises BuildError where TensorRT or Triton isn't installed, and
    for what can't be built, with the layer or the kernel.
    """
    trt, trtp = installed_tensorrt()
    require_triton()
    from llmbuild.builder.targets.tensorrt.lower_paged import lower_paged

    log = CollectedLog(trt)
    builder = trt.Builder(log.logger)
    network = builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
    registry = PluginRegistry(trt, trtp, limits.sm)
    arguments = (step, config, limits, activations, read)
    try:
        lowering = lower_paged(trt, network, *arguments, registry.instantiate)
    except BuildError as error:
        raise BuildError(f"{error}: {log.text()}" if log.errors else str(error)) from error
    registry.compile(lowering.plugins.values())
    settings = builder.create_builder_config()
    add_profiles(builder, settings, paged_profiles(shapes_of(lowering.inputs), limits))
    if timing_cache is not None:
        _load(settings, timing_cache)
    plan = serialise(trt, builder, network, settings, log)
    if timing_cache is not None:
        timing_cache.parent.mkdir(parents=True, exist_ok=True)
        timing_cache.write_bytes(bytes(settings.get_timing_cache().serialize()))
    return BuiltPlan(plan, tensors_of(trt, network))


def installed_tensorrt() -> tuple[Any, Any]:
    """tensorrt and tensorrt.plugin. Raises BuildError where they are missing or too old."""
    try:
        import tensorrt
        import tensorrt.plugin
    except ImportError as error:
        raise BuildError(f"the tensorrt target needs TensorRT ({error}); {_INSTALL}") from error
    version = str(tensorrt.__version__)
    if int(version.partition(".")[0]) < _FIRST_MAJOR:
        raise BuildError(f"the tensorrt target can't use TensorRT {version}; {_INSTALL}")
    return tensorrt, tensorrt.plugin


def _load(settings: Any, timing_cache: Path) -> None:
    content = timing_cache.read_bytes() if timing_cache.exists() else b""
    settings.set_timing_cache(settings.create_timing_cache(content), ignore_mismatch=False)
