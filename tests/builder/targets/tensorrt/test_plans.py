"""Plans that TensorRT for RTX builds here, without a GPU; nothing runs them."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from network_models import FAMILIES, GRID_SIZES, SCHEMES, Model, RandomTensors

from llmbuild.builder.models.config import DecoderConfig, RopeConfig
from llmbuild.builder.shard.graphs import rank_graphs
from llmbuild.builder.targets.tensorrt.build import build_plan
from llmbuild.builder.targets.tensorrt.limits import Limits
from llmbuild.errors import BuildError
from llmbuild.quant.plan import QuantPlan
from llmbuild.quant.reader import PlannedReader
from llmbuild.runtime.manifest import KVLayout, Parallel
from llmbuild.runtime.plan_header import check_plan, read_plan_header

trt = pytest.importorskip("tensorrt_rtx")

LIMITS = Limits(batch=2, chunk=8, capacity=32)
SMOLLM2 = {
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_layers": 30,
    "num_heads": 9,
    "num_kv_heads": 3,
    "head_dim": 64,
    "ropes": (RopeConfig("default", 1e5, 64),),
    "layer_ropes": (0,) * 30,
    "windows": (0,) * 30,
    "attention_scale": 0.125,
    "tie_embeddings": True,
}


def plan(
    model: Model, capabilities: tuple[str, ...] = ("8.9",), activations: Any = "fp16"
) -> bytes:
    arguments = (model.step, model.config, LIMITS, activations, model.read, capabilities)
    return build_plan(*arguments).content


@pytest.fixture(scope="module")
def plan_path(model_of: Callable[..., Model], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama's, for compute capabilities 8.9 and 12.0."""
    path = tmp_path_factory.mktemp("plan") / "engine.plan"
    path.write_bytes(plan(model_of(), ("8.9", "12.0")))
    return path


def test_header_tells_size_version_and_capabilities(plan_path: Path) -> None:
    header = read_plan_header(plan_path)
    assert header.size_bytes == plan_path.stat().st_size
    assert header.version == trt.__version__
    assert header.capabilities == ("8.9", "12.0")
    check_plan(plan_path, trt.__version__, ["12.0"])


def test_plan_names_inputs_outputs_and_profiles(plan_path: Path) -> None:
    content = plan_path.read_bytes()
    for name in ("token_ids", "positions", "kv_lengths", "write_indices", "logit_rows", "logits"):
        assert name.encode() in content
    for name in ("cache.0.k", "cache.1.v", "cache.1.v.updated"):
        assert name.encode() in content


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_builds(model_of: Callable[..., Model], family: str) -> None:
    assert plan(model_of(**FAMILIES[family]))[:4] == b"vtrt"


def test_bf16_builds(model_of: Callable[..., Model]) -> None:
    assert plan(model_of(), activations="bf16")[:4] == b"vtrt"


@pytest.mark.parametrize("scheme", SCHEMES)
def test_quantised_weights_build_for_every_capability(
    model_of: Callable[..., Model], scheme: str
) -> None:
    model = model_of(scheme, **GRID_SIZES)
    capabilities = ("8.9", "12.0") if scheme == "fp8_w8a8" else ("8.0", "8.6", "8.9", "12.0")
    assert plan(model, capabilities)[:4] == b"vtrt"


def test_a_rank_of_three_builds_with_its_collectives(
    decoder_config: Callable[..., DecoderConfig], kv_layout: Callable[..., KVLayout]
) -> None:
    config = decoder_config(num_kv_heads=3, intermediate_size=21, vocab_size=39)
    reader = PlannedReader(RandomTensors(config), QuantPlan())
    parallel = Parallel(tp=3, pp=1)
    kv = kv_layout(config)
    rank = rank_graphs(parallel, config, "fp32", QuantPlan(), kv, {}, reader)[1]
    content = plan(Model(rank.step, rank.config, rank.read))
    assert content[:4] == b"vtrt"
    assert b"all_reduce.dist_collective" in content


def test_what_tensorrt_refuses_is_raised_with_the_layer_and_not_printed(
    model_of: Callable[..., Model], capfd: pytest.CaptureFixture[str]
) -> None:
    """A chunk that is longer than a cache."""
    model = model_of()
    with pytest.raises(BuildError, match=r"rotary\.kv_cache_update"):
        build_plan(model.step, model.config, Limits(2, 64, 32), "fp16", model.read, ("8.9",))
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("capabilities", [(), ("7.0",), ("8.9", "9.0")])
def test_capabilities_that_cannot_be_built_for_are_refused(
    model_of: Callable[..., Model], capabilities: tuple[str, ...]
) -> None:
    with pytest.raises(BuildError, match=r"7\.5, 8\.0, 8\.6, 8\.9, 12\.0, 12\.1, not"):
        plan(model_of(), capabilities)


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["", *SCHEMES])
def test_smollm2_builds_and_its_plan_is_little_more_than_its_weights(
    model_of: Callable[..., Model], scheme: str
) -> None:
    model = model_of(scheme, **SMOLLM2)
    begin = time.monotonic()
    limits = Limits(batch=8, chunk=2048, capacity=2048)
    content = build_plan(
        model.step, model.config, limits, "fp16", model.read, ("8.9", "12.0")
    ).content
    seconds = time.monotonic() - begin
    print(f"{scheme or 'fp16'}: {seconds:.1f} s, {len(content) / 1e6:.0f} MB")
    table, others = 49152 * 576, 30 * 576 * (576 + 2 * 192 + 576 + 3 * 1536)
    bits = {"": 0, "w4a16": 4.5, "w8a16": 8, "w8a8-static": 8, "fp8_w8a8": 8}[scheme]
    weights = (table * (2 + bits / 8) + others * bits / 8) if bits else (table + others) * 2
    assert weights < len(content) < weights + 60e6  # kernels for both, and copies in other layouts
