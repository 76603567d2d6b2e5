"""What both targets' plans are when they are built, and how the builder is told their profiles."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from llmbuild.builder.graph.step_graph import NEXT_HIDDEN, OUTPUT
from llmbuild.builder.targets.tensorrt.profiles import Range
from llmbuild.runtime.target import PlanTensor

_FIRST_SIZES = {OUTPUT: "R", NEXT_HIDDEN: "T"}


@dataclass(frozen=True)
class BuiltPlan:
    """A serialised plan, and its inputs and outputs."""

    content: bytes
    tensors: list[PlanTensor]


def tensors_of(trt: Any, network: Any) -> list[PlanTensor]:
    """A network's inputs and outputs."""
    dtypes = {
        trt.int32: "int32",
        trt.int64: "int64",
        trt.float16: "fp16",
        trt.bfloat16: "bf16",
        trt.float32: "fp32",
    }
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


def add_profiles(builder: Any, settings: Any, profiles: Iterable[Mapping[str, Range]]) -> None:
    """Tell the builder the ranges of each input, profile by profile."""
    for ranges in profiles:
        profile = builder.create_optimization_profile()
        for name, sizes in ranges.items():
            profile.set_shape(name, sizes.least, sizes.best, sizes.most)
        settings.add_optimization_profile(profile)


def shapes_of(inputs: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Of a network's inputs, -1 where a size may change."""
    return {name: tuple(tensor.shape) for name, tensor in inputs.items()}
