"""Stands for TensorRT's module where a plan with plugins is built: it records what its builder is
asked for, and checks the network as it grows."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from stand_in_plugin import Definition, StandInPlugin, TensorDesc

from llmbuild.builder import paged_plans
from llmbuild.builder.emulate_engine import emulate_engine
from llmbuild.builder.sources.progress import PlainProgress
from llmbuild.builder.targets.tensorrt import build_paged
from llmbuild.builder.targets.tensorrt.emulation.module import DataType, EmulatedTensorRT
from llmbuild.builder.targets.tensorrt.emulation.network import EmulatedNetwork
from llmbuild.builder.targets.tensorrt.emulation.tensors import Layer, Made, Tensor
from llmbuild.builder.targets.tensorrt.plugins import PluginRegistry
from llmbuild.runtime.manifest import Manifest
from llmbuild.runtime.replay import STEPS_FILE, load_steps


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

    class IProgressMonitor:
        pass

    class ILogger:
        Severity = SimpleNamespace(ERROR=1, INTERNAL_ERROR=0)

    def __init__(self) -> None:
        self.profiles: list[dict[str, Any]] = []
        self.loaded: list[bytes] = []
        self.plan: bytes | None = b"plan"

    @staticmethod
    def made(network: StandInNetwork) -> None:
        """Told of each network."""

    def Builder(self, logger: Any) -> Any:
        self.network = StandInNetwork(more_layers={"plugin_v3": plugin_layer})
        self.made(self.network)
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


@contextmanager
def build_machine() -> Iterator[StandInTensorRT]:
    """A machine that has TensorRT and a GPU of compute capability 8.9, it seems."""
    module = StandInTensorRT()
    with pytest.MonkeyPatch.context() as patch:
        for at in (build_paged, paged_plans):
            patch.setattr(at, "installed_tensorrt", lambda: (module, StandInPlugin()))
        patch.setattr(paged_plans, "compute_capability", lambda: "8.9")
        yield module


@contextmanager
def interpreting_machine() -> Iterator[StandInTensorRT]:
    """The same in a process where Triton interprets: no kernel is compiled, and emulated runs stay
    here."""
    with build_machine() as module, pytest.MonkeyPatch.context() as patch:
        for at in (build_paged, paged_plans):
            patch.setattr(at, "require_triton", lambda: None)
        patch.setattr(paged_plans, "emulate_apart", _emulate_here)
        patch.setattr(PluginRegistry, "compile", lambda self, plugins: None)
        yield module


def _emulate_here(root: Path, manifest: Manifest, base_dir: Path) -> list[Any]:
    steps = load_steps(root / STEPS_FILE)
    return list(emulate_engine(root, manifest, steps, base_dir, PlainProgress()))


def save_recipe(folder: Path, save_tiny_llama: Callable[..., Path], **overrides: int) -> Path:
    """A recipe for tensorrt, and its model, whose kernels take the interpreter little time."""
    sizes = {"head_dim": 16, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    path = save_tiny_llama(folder, **sizes | heads | overrides)
    text = path.read_text().replace("precision: fp32", "precision: fp16\ntarget: tensorrt")
    path.write_text(text.replace("max_sequences: 8", "max_sequences: 3"))
    return path
