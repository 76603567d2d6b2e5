"""Our plugins in TensorRT: quick-deploy plugins, whose kernels are compiled ahead and lie in
the plan as PTX.

None has run inside TensorRT yet. A plugin that follows addresses or indices has one kernel alone:
what TensorRT needn't choose it doesn't time, and what it times it runs on numbers of its own.
"""

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from types import GenericAlias
from typing import Any

from llmbuild.builder.targets.gpu.capabilities import WARP_THREADS
from llmbuild.builder.targets.gpu.compiled_kernel import CompiledKernel
from llmbuild.builder.targets.gpu.kernels import Request, compile_kernels, usable
from llmbuild.builder.targets.tensorrt.lowering import Tensor
from llmbuild.plugins.common.kernel_variant import KernelVariant
from llmbuild.plugins.common.tensorrt_plugin import (
    TENSOR_DTYPES,
    Plugin,
    Shapes,
    Tactic,
    arguments,
)

NAMESPACE = "llmbuild"

# What tensorrt.plugin calls the types of a combination.
_TYPE_NAMES = {
    "float32": "FP32",
    "float16": "FP16",
    "bfloat16": "BF16",
    "int64": "INT64",
    "int32": "INT32",
    "int8": "INT8",
}

# The kernels of each plugin's tactics by the plugin's name, for as long as plugins are registered.
_KERNELS: dict[str, list[CompiledKernel]] = {}


class PluginRegistry:
    """Plugins with kernels for one SM. trt, trtp: tensorrt and tensorrt.plugin, which keeps what
    was registered as long as the process lives."""

    def __init__(self, trt: Any, trtp: Any, sm: int) -> None:
        self._trt, self._trtp, self._sm = trt, trtp, sm

    def instantiate(self, plugin: Plugin, inputs: Sequence[Tensor]) -> tuple[Any, ...]:
        """What a network's add_plugin_v3 takes; registers the plugin when first asked."""
        name = self._name(plugin)
        namespace = getattr(self._trtp.op, NAMESPACE, None)
        if getattr(namespace, name, None) is None:
            self._register(plugin)
        create = getattr(getattr(self._trtp.op, NAMESPACE), name)(*inputs)
        return tuple(create(self._trt.QuickPluginCreationRequest.STRICT_AOT))

    def compile(self, plugins: Iterable[Plugin]) -> None:
        """The kernels of plugins, which TensorRT asks for when it builds. Raises BuildError for one
        that can't be used."""
        plugins = [plugin for plugin in plugins if self._name(plugin) not in _KERNELS]
        variants = [tactic.variant for plugin in plugins for tactic in plugin.tactics]
        kernels = iter(_compiled(variants, self._sm))
        for plugin in plugins:
            _KERNELS[self._name(plugin)] = [next(kernels) for _ in plugin.tactics]

    def _name(self, plugin: Plugin) -> str:
        return f"{plugin.name}_sm{self._sm}"

    def _register(self, plugin: Plugin) -> None:
        name, trtp = self._name(plugin), self._trtp
        identity = f"{NAMESPACE}::{name}"
        trtp.register(identity)(_describe(self._trt, trtp, plugin))
        if len(plugin.tactics) > 1:
            trtp.autotune(identity)(_autotune(trtp, plugin))
        trtp.aot_impl(identity)(_implement(trtp, plugin, lambda: _KERNELS[name]))


def _compiled(variants: Sequence[KernelVariant], sm: int) -> list[CompiledKernel]:
    """Every variant's kernel. Tiles are chosen for a few models' shapes: where one of another
    breaks a gate, such as that nothing is spilled, it is tried in other ways."""
    outcomes = compile_kernels([Request(variant, sm) for variant in variants])
    for other in (_with_more_warps, _without_pipeline):
        broken = [index for index, outcome in enumerate(outcomes) if outcome.problem]
        requests = [Request(other(variants[index]), sm) for index in broken]
        for index, outcome in zip(broken, compile_kernels(requests), strict=True):
            if not outcome.problem:
                outcomes[index] = outcome
    return [kernel for _, kernel in usable(outcomes)]


def _with_more_warps(variant: KernelVariant) -> KernelVariant:
    return replace(variant, num_warps=2 * variant.num_warps)


def _without_pipeline(variant: KernelVariant) -> KernelVariant:
    return replace(variant, num_stages=1)


def _describe(trt: Any, trtp: Any, plugin: Plugin) -> Callable[..., Any]:
    """The outputs' descriptions, of the inputs'."""

    def describe(*inputs: Any) -> tuple[Any, ...]:
        shapes = plugin.output_shapes(_shapes(plugin, inputs))
        return tuple(
            trtp.from_shape_expr(tuple(shapes[name]), getattr(trt, TENSOR_DTYPES[kind]))
            for name, kind in plugin.outputs.items()
        )

    results = GenericAlias(tuple, (trtp.TensorDesc,) * len(plugin.outputs))
    _sign(describe, plugin.inputs, trtp.TensorDesc, [], results)
    return describe


def _autotune(trtp: Any, plugin: Plugin) -> Callable[..., Any]:
    """TensorRT times every tactic; their numbers begin at 1."""

    def autotune(*_: Any) -> list[Any]:
        kinds = [*plugin.inputs.values(), *plugin.outputs.values()]
        types = ", ".join(_TYPE_NAMES[TENSOR_DTYPES[kind]] for kind in kinds)
        tactics = list(range(1, len(plugin.tactics) + 1))
        return [trtp.AutoTuneCombination(types, "LINEAR", tactics)]

    _sign(autotune, plugin.inputs, trtp.TensorDesc, ["outputs"], list[trtp.AutoTuneCombination])
    return autotune


def _implement(
    trtp: Any, plugin: Plugin, kernels: Callable[[], list[CompiledKernel]]
) -> Callable[..., Any]:
    """A kernel's name and PTX, how it is launched, and its integers, all of the shapes."""

    def implement(*values: Any) -> tuple[str, str, Any, Any]:
        inputs, number = values[: len(plugin.inputs)], values[-1]
        index = max(number - 1, 0)  # 0 where there was nothing to choose
        tactic, kernel = plugin.tactics[index], kernels()[index]
        launch = tactic.launch(_shapes(plugin, inputs))
        parameters = trtp.KernelLaunchParams()
        for axis, size in zip("xyz", launch.grid, strict=False):
            setattr(parameters, f"grid_{axis}", size)
        parameters.block_x = kernel.resources.num_warps * WARP_THREADS
        parameters.shared_mem = kernel.resources.shared_bytes
        names = _integers(plugin, tactic)
        integers = trtp.SymIntExprs(len(names))
        for place, name in enumerate(names):
            integers[place] = trtp.SymInt32(launch.integers[name])
        return kernel.entry, kernel.ptx, parameters, integers

    result = tuple[str, str, trtp.KernelLaunchParams, trtp.SymIntExprs]
    _sign(implement, plugin.inputs, trtp.TensorDesc, ["outputs", "tactic"], result)
    return implement


def _shapes(plugin: Plugin, inputs: Sequence[Any]) -> Shapes:
    return {name: tuple(each.shape_expr) for name, each in zip(plugin.inputs, inputs, strict=True)}


def _integers(plugin: Plugin, tactic: Tactic) -> list[str]:
    """Names of the kernel's integers, in its order."""
    kinds = tactic.variant.signature
    return [name for name in arguments(plugin, tactic) if kinds[name][0] != "*"]


def _sign(
    function: Any, inputs: Mapping[str, str], description: Any, others: list[str], result: Any
) -> None:
    """TensorRT reads a plugin's inputs from its functions' signatures."""
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    tensors = [inspect.Parameter(name, kind, annotation=description) for name in inputs]
    more = [inspect.Parameter(name, kind) for name in others]
    function.__signature__ = inspect.Signature([*tensors, *more], return_annotation=result)
