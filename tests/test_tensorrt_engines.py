"""`llmbuild compile` for tensorrt, with stand-ins for TensorRT, its GPU and the compiling of
kernels; the network that the plan would be built of is run on the CPU, its plugins in Triton's
interpreter, and held to the reference. TensorRT itself never met it."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner

sys.path.append(str(Path(__file__).parent / "builder/targets/tensorrt"))

from stand_in_tensorrt import StandInNetwork, StandInTensorRT, interpreting_machine, save_recipe

from llmbuild.builder import paged_plans
from llmbuild.builder.compile import compile, compile_rank
from llmbuild.builder.targets.tensorrt import build_paged
from llmbuild.errors import BuildError, EngineError, InternalError, RecipeError
from llmbuild.runtime import engine as engine_module
from llmbuild.runtime.contradictions import pool_contradictions
from llmbuild.runtime.engine import open_engine
from llmbuild.runtime.inspect_cli import inspect
from llmbuild.runtime.manifest import KVLayer, Manifest, Span, read_manifest
from llmbuild.runtime.replay import STEPS_FILE, load_steps
from llmbuild.runtime.target import TensorrtTarget
from llmbuild.verify_cli import verify_command

INSTALLED = build_paged.installed_tensorrt
VERSION = StandInTensorRT.__version__

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, where a row is padding


@pytest.fixture(scope="module")
def stand_ins() -> Iterator[StandInTensorRT]:
    with interpreting_machine() as module:
        yield module


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory, save_tiny_llama: Callable[..., Path]) -> Path:
    return save_recipe(tmp_path_factory.mktemp("tensorrt"), save_tiny_llama)


@pytest.fixture(scope="module")
def compiled(stand_ins: StandInTensorRT, recipe: Path) -> Path:
    return compile(recipe, recipe.parent / "engine", ["kv_cache.dtype=int8"])


def test_an_engine_says_what_it_is_and_needs(compiled: Path) -> None:
    manifest = read_manifest(compiled)
    (rank,) = manifest.ranks
    assert manifest.target == TensorrtTarget(version=VERSION, capability="8.9")
    assert rank.executables == {"8.9": "rank0/engine.plan"}
    assert (compiled / "rank0/engine.plan").read_bytes() == b"plan"
    pools = [each.name for each in rank.plan_tensors if each.name.startswith("pool.")]
    assert pools == ["pool.0.k_items", "pool.0.k_scales", "pool.0.v_items", "pool.0.v_scales"]
    assert manifest.kv.block_size == 4


def test_inspect_shows_it(compiled: Path) -> None:
    done = CliRunner().invoke(inspect, [str(compiled)])
    assert done.exit_code == 0, done.output
    lines = [" ".join(line.split()) for line in done.output.splitlines()]
    said = f"tensorrt {VERSION}: compute capability 8.9"
    for line in (
        f"target {said}",
        f"plan rank0/engine.plan: 4 bytes, {said}",
        "input block_tables int32 [S, B]",
        "input pool.0.v_scales int64 [1]",
        "output logits fp32 [R, 257]",
    ):
        assert line in lines


def test_verify_emulates_it(compiled: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(compiled.parent)
    done = CliRunner().invoke(verify_command, [str(compiled), "--emulate"])
    assert done.exit_code == 0, done.output
    assert "emulated, not run on a GPU" in done.output
    assert "verified: at most" in done.output


def test_fp8_is_built_of_layers_and_emulated(stand_ins: StandInTensorRT, recipe: Path) -> None:
    """Calibrated with a text; no plugin multiplies, and the build holds it to the reference."""
    (recipe.parent / "text.txt").write_text("".join(f"{n} and {n} is {2 * n}. " for n in range(50)))
    calibration = "calibration={data: text.txt, sequences: 4, length: 16}"
    root = compile(recipe, recipe.parent / "fp8", ["quantisation=fp8_w8a8", calibration])
    assert read_manifest(root).quantised_kinds == {"fp8 by row, fp8 activations, static scales": 8}
    report = json.loads((root / "report.json").read_text())
    assert 0 < report["emulated"] < report["tolerance"] == 0.4
    kinds = [layer.kind for layer in stand_ins.network.layers]
    assert kinds.count("quantize") == kinds.count("matrix_multiply") > 0


@pytest.mark.slow
def test_activations_may_be_bf16(stand_ins: StandInTensorRT, recipe: Path) -> None:
    root = compile(recipe, recipe.parent / "bf16", ["precision=bf16"])
    report = json.loads((root / "report.json").read_text())
    assert 0 < report["emulated"] < report["tolerance"] == 0.15
    manifest = read_manifest(root)
    assert manifest.kv.layers[0].k_dtypes == ["bf16"]
    assert {each.dtype for each in manifest.ranks[0].plan_tensors} == {"int32", "int64", "fp32"}


@pytest.mark.slow
def test_a_kv_cache_in_fp8_has_no_scales_and_is_held_to_the_reference(
    stand_ins: StandInTensorRT, recipe: Path
) -> None:
    root = compile(recipe, recipe.parent / "fp8-kv", ["kv_cache.dtype=fp8"])
    report = json.loads((root / "report.json").read_text())
    assert 0 < report["emulated"] < report["tolerance"] == 0.2
    (rank,) = read_manifest(root).ranks
    pools = [each.name for each in rank.plan_tensors if each.name.startswith("pool.")]
    assert pools == ["pool.0.k_items", "pool.0.v_items"]


@pytest.mark.slow
@pytest.mark.parametrize("stages", [1, 2])
def test_ranks_have_plans_with_collectives_and_are_held_to_the_whole_model(
    stand_ins: StandInTensorRT,
    tmp_path: Path,
    save_tiny_llama: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
    stages: int,
) -> None:
    networks: list[StandInNetwork] = []
    monkeypatch.setattr(stand_ins, "made", networks.append)
    recipe = save_recipe(tmp_path, save_tiny_llama, num_hidden_layers=stages)
    root = compile(recipe, tmp_path / "engine", [f"parallel={{tp: 2, pp: {stages}}}"])
    report = json.loads((root / "report.json").read_text())
    assert 0 < report["emulated"] < report["tolerance"] == 0.03
    manifest = read_manifest(root)
    assert pool_contradictions(manifest) == []
    inputs = [{each.name for each in rank.plan_tensors} for rank in manifest.ranks]
    assert len(inputs) == len(networks) == 2 * stages
    of_first, of_last = [True, True, False, False], [False, False, True, True]
    assert ["token_ids" in names for names in inputs] == of_first[: 2 * stages]
    assert ["hidden" in names for names in inputs] == of_last[: 2 * stages]
    assert ["logits" in names for names in inputs] == of_last[-2 * stages :]
    counts = [[layer.kind for layer in each.layers].count("dist_collective") for each in networks]
    assert counts == [3, 3, 2, 2][: 2 * stages]  # embedding, attention, MLP
    monkeypatch.setattr(engine_module, "compute_capability", lambda: "8.9")
    monkeypatch.setattr(engine_module, "tensorrt_version", lambda: VERSION)
    if stages == 1:
        assert open_engine(root).variant == "8.9"
    else:
        with pytest.raises(EngineError, match="2 stages, which can't be served on GPUs yet"):
            open_engine(root)


@pytest.mark.slow
def test_a_build_compiles_its_kernels_and_emulates_them_in_a_process_of_its_own(
    recipe: Path, checkout: Path
) -> None:
    """With nothing but TensorRT and the GPU stood in for."""
    script = checkout / "tests/builder/targets/tensorrt/compile_engine.py"
    out = recipe.parent / "apart"
    overrides = ["quantisation={scheme: w4a8, group_size: 32, method: rtn}", "kv_cache.dtype=int8"]
    environment = {name: os.environ[name] for name in os.environ if name != "TRITON_INTERPRET"}
    cache = {"LLMBUILD_CACHE": str(recipe.parent / "cache")}
    subprocess.run(
        [sys.executable, script, recipe, out, *overrides], env=environment | cache, check=True
    )
    report = json.loads((out / "report.json").read_text())
    assert 0 < report["emulated"] < report["tolerance"]
    assert any((recipe.parent / "cache" / "kernels").iterdir())
    assert (recipe.parent / "cache/tensorrt" / f"{VERSION}-8.9.timing").read_bytes() == b"timings"


def test_a_network_that_diverges_is_not_published(
    stand_ins: StandInTensorRT, recipe: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def wrong(root: Path, manifest: Manifest, base_dir: Path) -> list[Any]:
        return [logits + 1 for logits in load_steps(root / STEPS_FILE).logits]

    monkeypatch.setattr(paged_plans, "emulate_apart", wrong)
    with pytest.raises(InternalError, match="emulated network's logits differ"):
        compile(recipe, recipe.parent / "diverged")
    assert not (recipe.parent / "diverged").exists()


def test_what_no_kernel_is_for_is_told_by_name_and_not_emulated(
    stand_ins: StandInTensorRT,
    tmp_path: Path,
    save_tiny_llama: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(paged_plans, "emulate_apart", None)
    recipe = save_recipe(tmp_path, save_tiny_llama, num_key_value_heads=2)
    overrides = ["kv_cache.overrides=[{match: 'layers.0.k.0', dtype: int8}]"]
    with pytest.raises(BuildError, match="KV heads of several dtypes"):
        compile(recipe, tmp_path / "engine", overrides)
    assert not (tmp_path / "engine").exists()


# What is refused, before anything is fetched


@pytest.fixture
def nowhere(recipe: Path) -> list[str]:
    """An override: a model that can't be had."""
    return ["model.source=path:nowhere"]


def test_without_tensorrt_it_says_what_to_install(
    recipe: Path, nowhere: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(paged_plans, "installed_tensorrt", INSTALLED)
    monkeypatch.setitem(sys.modules, "tensorrt", None)
    with pytest.raises(BuildError, match=r"needs TensorRT .*'\.\[build,tensorrt\]'.*10\.14 breaks"):
        compile(recipe, recipe.parent / "none", nowhere)
    assert not (recipe.parent / "none").exists()


def test_a_machine_without_a_gpu_builds_nothing(
    stand_ins: StandInTensorRT,
    recipe: Path,
    nowhere: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def none() -> str:
        raise EngineError("no GPU")

    monkeypatch.setattr(paged_plans, "compute_capability", none)
    with pytest.raises(BuildError, match="builds on the GPU that its plans are for"):
        compile(recipe, recipe.parent / "none", nowhere)


def test_another_gpu_than_the_recipes_is_refused(
    stand_ins: StandInTensorRT, recipe: Path, nowhere: list[str]
) -> None:
    overrides = [*nowhere, "target={kind: tensorrt, capabilities: 9.0}"]
    with pytest.raises(BuildError, match=r"9\.0 was chosen, and the GPU here has 8\.9"):
        compile(recipe, recipe.parent / "none", overrides)


def test_a_gpu_that_no_kernel_is_for_is_refused(
    stand_ins: StandInTensorRT,
    recipe: Path,
    nowhere: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(paged_plans, "compute_capability", lambda: "7.5")
    with pytest.raises(BuildError, match="aren't built for SM 75"):
        compile(recipe, recipe.parent / "none", nowhere)


def test_fp8_on_a_gpu_without_it_is_refused(
    stand_ins: StandInTensorRT,
    recipe: Path,
    nowhere: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(paged_plans, "compute_capability", lambda: "8.6")
    with pytest.raises(BuildError, match=r"has 8\.6; compile on one of 8\.9, 9\.0, 10\.0, 12\.0"):
        compile(recipe, recipe.parent / "none", [*nowhere, "quantisation=fp8_w8a8"])


def test_ranks_are_not_compiled_one_by_one(recipe: Path) -> None:
    with pytest.raises(RecipeError, match="leave it out, tensorrt builds"):
        compile_rank(0, recipe, recipe.parent / "rank")


# Loading


def test_a_machine_with_its_gpu_and_its_tensorrt_runs_it(
    compiled: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_module, "compute_capability", lambda: "8.9")
    monkeypatch.setattr(engine_module, "tensorrt_version", lambda: VERSION)
    assert open_engine(compiled).variant == "8.9"
    monkeypatch.setattr(engine_module, "tensorrt_version", lambda: "11.5.0.1")
    with pytest.raises(EngineError, match=rf"for TensorRT {VERSION}, and 11\.5\.0\.1 is installed"):
        open_engine(compiled)
    monkeypatch.setattr(engine_module, "tensorrt_version", lambda: VERSION)
    monkeypatch.setattr(engine_module, "compute_capability", lambda: "9.0")
    with pytest.raises(EngineError, match=r"compute capabilities 8\.9, and this GPU has 9\.0"):
        open_engine(compiled)


def test_a_manifest_whose_plan_has_other_pools_is_refused(compiled: Path) -> None:
    manifest = read_manifest(compiled)
    (rank,) = manifest.ranks
    lacking = [each for each in rank.plan_tensors if each.name != "pool.0.v_scales"]
    ranks = [msgspec.structs.replace(rank, plan_tensors=lacking)]
    told = pool_contradictions(msgspec.structs.replace(manifest, ranks=ranks))
    assert told == ["rank 0's plan has other pools than its layers: pool.0.v_scales"]
    mixed = KVLayer.of_heads([("fp16", "fp16"), ("int8", "int8")])
    kv = msgspec.structs.replace(manifest.kv, layers=[mixed])
    ranks = [msgspec.structs.replace(rank, kv_heads=Span(first=0, count=2))]
    told = pool_contradictions(msgspec.structs.replace(manifest, kv=kv, ranks=ranks))
    assert told == ["KV layer 0 of rank 0 has heads of several dtypes"]
