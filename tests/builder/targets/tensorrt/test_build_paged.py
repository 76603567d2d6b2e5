"""How a plan with our plugins is built, with stand-ins for TensorRT's builder and for the compiling
of kernels."""

from collections.abc import Callable
from pathlib import Path

import pytest
from network_models import Model
from paged_steps import paged_limits
from stand_in_plugin import StandInPlugin
from stand_in_tensorrt import StandInTensorRT

from llmbuild.builder.targets.tensorrt import build_paged
from llmbuild.builder.targets.tensorrt.build_paged import build_paged_plan
from llmbuild.builder.targets.tensorrt.built_plan import BuiltPlan
from llmbuild.builder.targets.tensorrt.plugins import PluginRegistry
from llmbuild.errors import BuildError


@pytest.fixture
def trt(monkeypatch: pytest.MonkeyPatch) -> StandInTensorRT:
    module = StandInTensorRT()
    monkeypatch.setattr(build_paged, "installed_tensorrt", lambda: (module, StandInPlugin()))
    monkeypatch.setattr(build_paged, "require_triton", lambda: None)  # which interprets here
    monkeypatch.setattr(PluginRegistry, "compile", lambda self, plugins: None)
    return module


def build(model: Model, timing_cache: Path | None = None) -> BuiltPlan:
    limits = paged_limits(model, "fp16", "int8")
    arguments = (model.step, model.config, limits, "fp16", model.read)
    return build_paged_plan(*arguments, timing_cache)  # type: ignore[arg-type]


def test_network_and_profiles_are_given_to_the_builder(
    trt: StandInTensorRT, model_of: Callable[..., Model]
) -> None:
    assert build(model_of()).content == b"plan"
    assert list(trt.network.outputs) == ["logits"]
    assert len(trt.profiles) == 2
    assert all(profile.keys() == trt.network.inputs.keys() for profile in trt.profiles)


def test_inputs_and_outputs_are_told_with_the_plan(
    trt: StandInTensorRT, model_of: Callable[..., Model]
) -> None:
    model = model_of()
    tensors = {each.name: each for each in build(model).tensors}
    pools = paged_limits(model, "fp16", "int8").kv.pool_bytes
    assert {name for name in tensors if name.startswith("pool.")} == {*pools}
    assert {tensors[name].describe() for name in pools} == {"int64 [1]"}
    assert tensors["query_start"].describe() == "int32 [S + 1]"
    assert tensors["block_tables"].describe() == "int32 [S, B]"
    assert tensors["logits"].describe() == f"fp32 [R, {model.config.vocab_size}]"
    assert [name for name, each in tensors.items() if not each.is_input] == ["logits"]


def test_timings_are_read_and_written(
    trt: StandInTensorRT, model_of: Callable[..., Model], tmp_path: Path
) -> None:
    cache = tmp_path / "timing.cache"
    for _ in range(2):
        build(model_of(), cache)
    assert trt.loaded == [b"", b"timings"]
    assert cache.read_bytes() == b"timings"


def test_a_plan_that_cannot_be_built_is_an_error(
    trt: StandInTensorRT, model_of: Callable[..., Model]
) -> None:
    trt.plan = None
    with pytest.raises(BuildError, match="TensorRT can't build the plan: TensorRT gave no reason"):
        build(model_of())
