"""Plugins in an emulated network: their kernels run in Triton's interpreter, launched as TensorRT
would launch them. It can't multiply bf16, so kernels for that are given fp32 in its place, and what
they give is rounded to bf16."""

from collections.abc import Sequence
from typing import Any

import torch

from llmbuild.builder.targets.tensorrt.emulation.module import TORCH_TYPES, DataType
from llmbuild.builder.targets.tensorrt.emulation.tensors import Layer, Made, Tensor
from llmbuild.errors import BuildError
from llmbuild.plugins.common.tensorrt_plugin import (
    TENSOR_DTYPES,
    Plugin,
    Shapes,
    Tactic,
    arguments,
)

_KERNEL_TYPES = {
    "*fp32": torch.float32,
    "*fp16": torch.float16,
    "*bf16": torch.float32,
    "*i64": torch.int64,
    "*i32": torch.int32,
    "*i8": torch.int8,
    "*u8": torch.uint8,
    "*fp8e4nv": torch.float8_e4m3fn,
}
_LEFT_BY_OTHERS = {torch.int8: 77, torch.int32: 77}  # what no kernel may count on in its outputs


def instantiate(plugin: Plugin, inputs: Sequence[Tensor]) -> tuple[Any, ...]:
    """What an emulated network's add_plugin_v3 takes."""
    return list(inputs), [], plugin


def require_interpreter() -> None:
    """Raises BuildError where Triton is missing, or would compile."""
    try:
        from triton import knobs
    except ModuleNotFoundError as error:
        raise BuildError(
            "plugins are emulated by Triton; `pip install '.[build,gpu]'` in llmbuild's checkout "
            "has it"
        ) from error
    if not knobs.runtime.interpret:
        raise BuildError("plugins are emulated in a process with TRITON_INTERPRET=1 set")


def plugin_layer(
    layer: Layer, tensors: Sequence[Tensor], shape_tensors: Sequence[Tensor], plugin: Plugin
) -> Made:
    """Computes with the first of the plugin's tactics."""
    layer.require(not shape_tensors, "shape tensors")
    for (name, kind), tensor in zip(plugin.inputs.items(), tensors, strict=True):
        wanted = TENSOR_DTYPES[kind]
        layer.require(
            tensor.dtype is DataType[wanted], f"{name} is {tensor.dtype.value}, not {wanted}"
        )
    shapes = plugin.output_shapes(
        {name: tensor.sizes for name, tensor in zip(plugin.inputs, tensors, strict=True)}
    )
    outputs = [
        Tensor(DataType[TENSOR_DTYPES[kind]], tuple(shapes[name]))
        for name, kind in plugin.outputs.items()
    ]
    return Made(outputs, lambda *values: run_plugin(plugin, plugin.tactics[0], values))


def run_plugin(
    plugin: Plugin, tactic: Tactic, inputs: Sequence[torch.Tensor]
) -> tuple[torch.Tensor, ...]:
    """The plugin's outputs by one of its kernels."""
    shapes: Shapes = {
        name: tuple(value.shape) for name, value in zip(plugin.inputs, inputs, strict=True)
    }
    output_shapes = plugin.output_shapes(shapes)
    types = [TORCH_TYPES[DataType[TENSOR_DTYPES[kind]]] for kind in plugin.outputs.values()]
    outputs = tuple(
        _fresh(output_shapes[name], torch.float32 if dtype is torch.bfloat16 else dtype)
        for name, dtype in zip(plugin.outputs, types, strict=True)
    )
    launch = tactic.launch(shapes)
    kinds = tactic.variant.signature
    names = arguments(plugin, tactic)
    integers = [name for name in names if kinds[name][0] != "*"]
    given: list[Any] = [*inputs, *(launch.integers[name] for name in integers), *outputs]
    passed = {
        name: _viewed(value, kinds[name]) if isinstance(value, torch.Tensor) else value
        for name, value in zip(names, given, strict=True)
    }
    tactic.variant.kernel[launch.grid](**passed, **tactic.variant.constants)
    return tuple(value.to(dtype) for value, dtype in zip(outputs, types, strict=True))


def _fresh(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    value = float("nan") if dtype.is_floating_point else _LEFT_BY_OTHERS[dtype]
    return torch.full(tuple(shape), value, dtype=dtype)


def _viewed(value: torch.Tensor, kind: str) -> torch.Tensor:
    """The same memory in the kernel's type; numbers of bf16 in fp32."""
    value = value.contiguous()
    return value.float() if value.dtype is torch.bfloat16 else value.view(_KERNEL_TYPES[kind])
