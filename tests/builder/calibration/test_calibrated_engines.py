"""Whole builds that calibrate: verified, repeatable, and nearer to the model than without."""

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner

from llmbuild.builder.calibration import calibrate
from llmbuild.builder.compile import compile
from llmbuild.errors import BuildError, RecipeError
from llmbuild.runtime.inspect_cli import inspect
from llmbuild.runtime.isa import supported_levels
from llmbuild.runtime.manifest import read_manifest

WIDE = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "head_dim": 16}
WIDE |= {"num_hidden_layers": 2, "vocab_size": 258}
CALIBRATION = {"sequences": 4, "length": 24, "seed": 3}
SCHEMES: dict[str, dict[str, Any]] = {
    "gptq": {"scheme": "w4a8", "group_size": 32},
    "gptq, with minima": {"scheme": "w4a16", "group_size": 64, "symmetric": False},
    "awq": {"scheme": "w4a16", "group_size": 32, "method": "awq"},
    "smoothquant, static": {"scheme": "w8a8-static"},
    "static alone": {"scheme": "w8a8-static", "method": "rtn"},
    "smoothquant, dynamic": {"scheme": "w8a8", "method": "smoothquant"},
}

QUICK = ("gptq", "smoothquant, static")


@pytest.fixture
def save_recipe(
    tmp_path: Path, save_tiny_llama: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> Callable[..., Path]:
    """save_recipe(**keys): a tiny Llama and its recipe, which calibrates with few tokens and
    without what earlier builds calibrated."""

    def save(**keys: Any) -> Path:
        monkeypatch.setattr(calibrate, "cache_root", lambda: tmp_path / "cache")
        recipe = save_tiny_llama(tmp_path / "source", **WIDE)
        content = yaml.safe_load(recipe.read_text())
        content |= {"calibration": CALIBRATION, "target": {"isa": supported_levels()[0]}}
        recipe.write_text(yaml.safe_dump(content | keys))
        return recipe

    return save


def weights_sha256(engine: Path) -> str:
    return hashlib.sha256((engine / "rank0" / "weights.safetensors").read_bytes()).hexdigest()


@pytest.mark.parametrize(
    "quantisation",
    [
        pytest.param(scheme, id=name, marks=() if name in QUICK else pytest.mark.slow)
        for name, scheme in SCHEMES.items()
    ],
)
def test_a_calibrated_engine_is_verified_and_comes_out_the_same_again(
    save_recipe: Callable[..., Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    quantisation: dict[str, Any],
) -> None:
    recipe = save_recipe(quantisation=quantisation)
    first = compile(recipe, tmp_path / "first")
    (worst,) = json.loads((first / "report.json").read_text())["verified"].values()
    assert worst is not None
    is_static = [tensor.static_activations for tensor in read_manifest(first).quantised.values()]
    assert all(is_static) == ("static" in quantisation["scheme"])
    if quantisation["scheme"] == "w4a8":  # once suffices: nothing kept of the first build
        monkeypatch.setattr(calibrate, "cache_root", lambda: tmp_path / "empty")
        second = compile(recipe, tmp_path / "second")
        assert weights_sha256(first) == weights_sha256(second)


def told(engine: Path) -> str:
    """What `llmbuild inspect` says of an engine."""
    return " ".join(CliRunner().invoke(inspect, [str(engine)]).output.split())


def test_a_rotated_model_is_calibrated_apart_with_the_samples_of_the_model(
    save_recipe: Callable[..., Path], tmp_path: Path
) -> None:
    recipe = save_recipe(quantisation={"scheme": "w4a16", "group_size": 32, "rotation": True})
    for rotation in ("true", "false"):
        compile(recipe, tmp_path / rotation, [f"quantisation.rotation={rotation}"])
    kept = [*(tmp_path / "cache" / "calibration").iterdir()]
    assert sorted(path.suffix for path in kept) == ["", "", ".npy"]
    assert weights_sha256(tmp_path / "true") != weights_sha256(tmp_path / "false")
    rotated, plain = (told(tmp_path / name) for name in ("true", "false"))
    assert "model was rotated" in rotated
    assert "model was" not in plain
    assert "int4 in groups of 32, unrounded activations, by gptq" in plain


@pytest.mark.slow
def test_another_seed_calibrates_with_other_samples(
    save_recipe: Callable[..., Path], tmp_path: Path
) -> None:
    recipe = save_recipe(quantisation={"scheme": "w4a16", "group_size": 32})
    engines = [
        compile(recipe, tmp_path / str(seed), [f"calibration.seed={seed}"]) for seed in (1, 2)
    ]
    assert weights_sha256(engines[0]) != weights_sha256(engines[1])


def test_texts_and_chats_calibrate_too(save_recipe: Callable[..., Path], tmp_path: Path) -> None:
    lines = [{"text": "abc\u2028 " * 30}, {"text": "Hello, world. " * 20}]
    scheme = {"scheme": "w4a16", "group_size": 32}
    recipe = save_recipe(quantisation=scheme, calibration={**CALIBRATION, "data": "data.jsonl"})
    data = recipe.parent / "data.jsonl"
    as_they_are = (json.dumps(line, ensure_ascii=False) for line in lines)
    data.write_text("\ufeff" + "".join(line + "\n" for line in as_they_are), encoding="utf-8")
    compile(recipe, tmp_path / "engine")
    with pytest.raises(BuildError, match=r"calibration\.data: .* enough for"):
        compile(recipe, tmp_path / "refused", ["calibration.sequences=4000"])
    data.write_text('{"text": 3}\n')
    with pytest.raises(BuildError, match=r"data\.jsonl, line 1: "):
        compile(recipe, tmp_path / "refused", ["calibration.seed=9"])
    assert not (tmp_path / "refused").exists()


@pytest.mark.parametrize("data", ["absent.txt", ".", "x\0y"])
def test_data_that_are_no_file_are_refused_before_the_model_is_fetched(
    save_recipe: Callable[..., Path], tmp_path: Path, data: str
) -> None:
    recipe = save_recipe(calibration={**CALIBRATION, "data": data})
    with pytest.raises(RecipeError, match=r"calibration\.data: given .*isn't a file"):
        compile(recipe, tmp_path / "engine", ["model.source=path:nowhere"])


def test_a_static_kv_cache_is_calibrated(save_recipe: Callable[..., Path], tmp_path: Path) -> None:
    overrides = [
        {"match": "layers.0.k.*", "dtype": "int8-static"},
        {"match": "layers.1.v.1", "dtype": "int8-static"},
        {"match": "*.k.*", "dtype": "int4"},
    ]
    recipe = save_recipe(kv_cache={"dtype": "int8", "block_size": 4, "overrides": overrides})
    engine = compile(recipe, tmp_path / "engine")
    layers = read_manifest(engine).kv.layers
    assert [layer.k_dtypes for layer in layers] == [["int8-static"] * 2, ["int4"] * 2]
    assert [layer.v_dtypes for layer in layers] == [["int8"] * 2, ["int8", "int8-static"]]


def test_a_channel_that_calibration_never_saw_fails_the_build_and_is_named(
    save_recipe: Callable[..., Path], tmp_path: Path
) -> None:
    from safetensors.numpy import load_file, save_file

    recipe = save_recipe(kv_cache={"dtype": "int8-static"})
    path = recipe.parent / "model" / "model.safetensors"
    tensors = load_file(path)
    tensors["model.layers.1.self_attn.v_proj.weight"][16:] = 0
    save_file(tensors, path)
    with pytest.raises(BuildError, match=r"layers\.1\.v\.1 \(int8-static\): 16 of 16 channels"):
        compile(recipe, tmp_path / "engine")
    assert not (tmp_path / "engine").exists()


def test_distillation_trains_what_a_method_rounded_and_is_reported(
    save_recipe: Callable[..., Path], tmp_path: Path
) -> None:
    scheme = {"scheme": "w4a16", "group_size": 32}
    distillation = {"steps": 20, "batch": 4, "sequences": 6}
    recipe = save_recipe(quantisation=scheme, distillation=distillation)
    engine = compile(recipe, tmp_path / "engine")
    distilled = json.loads((engine / "report.json").read_text())["distilled"]
    assert distilled["steps"] == 20
    assert 0 < distilled["last_kl_nats"] < distilled["first_kl_nats"]
    assert read_manifest(engine).distilled


@pytest.mark.slow
def test_a_distilled_engine_comes_out_the_same_again(
    save_recipe: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scheme = {"scheme": "w4a16", "group_size": 32}
    distillation = {"steps": 20, "batch": 4, "sequences": 6}
    recipe = save_recipe(quantisation=scheme, distillation=distillation)
    engine = compile(recipe, tmp_path / "engine")
    rounded = compile(recipe, tmp_path / "rounded", ["distillation=null"])
    assert json.loads((rounded / "report.json").read_text())["distilled"] is None
    assert weights_sha256(rounded) != weights_sha256(engine)
    monkeypatch.setattr(calibrate, "cache_root", lambda: tmp_path / "empty")
    again = compile(recipe, tmp_path / "again")
    assert weights_sha256(again) == weights_sha256(engine)


@pytest.mark.parametrize(
    "quantisation",
    [
        {"scheme": "w8a8", "method": "rtn"},
        {"scheme": "w4a16", "group_size": 32, "overrides": [{"match": "*", "scheme": "w8a16"}]},
    ],
    ids=["rtn", "overridden"],
)
def test_distillation_without_anything_to_train_is_refused(
    save_recipe: Callable[..., Path], tmp_path: Path, quantisation: dict[str, Any]
) -> None:
    recipe = save_recipe(quantisation=quantisation, distillation={"steps": 5})
    with pytest.raises(
        RecipeError, match=r"distillation: given.* no matrix that it could train is rounded by gptq"
    ):
        compile(recipe, tmp_path / "engine")
    assert not (tmp_path / "engine").exists()


@pytest.mark.slow
def test_another_seed_is_another_distillation(
    save_recipe: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also of the same tokens: all of a file, which are gone through in another order."""
    scheme = {"scheme": "w4a16", "group_size": 32}
    calibration = {"data": "d.txt", "sequences": 10, "length": 16}
    distillation = {"steps": 1, "sequences": 10, "batch": 2}
    recipe = save_recipe(quantisation=scheme, calibration=calibration, distillation=distillation)
    (recipe.parent / "d.txt").write_text("0123456789abcdef" * 10)
    compile(recipe, tmp_path / "first")
    trained: list[int] = []
    distil = calibrate.distil

    def counted(*arguments: Any) -> Any:
        trained.append(arguments[-1])
        return distil(*arguments)

    monkeypatch.setattr(calibrate, "distil", counted)
    compile(recipe, tmp_path / "again")
    assert trained == []
    compile(recipe, tmp_path / "other", ["calibration.seed=1"])
    assert trained == [1]
    with pytest.raises(BuildError, match=r"enough for 10 .* distillation\.sequences is 11"):
        compile(recipe, tmp_path / "more", ["distillation.sequences=11"])


def test_what_calibration_kept_and_is_damaged_is_made_again_or_named(
    save_recipe: Callable[..., Path], tmp_path: Path
) -> None:
    recipe = save_recipe(quantisation={"scheme": "w4a16", "group_size": 32})
    compile(recipe, tmp_path / "first")
    (tokens,) = (tmp_path / "cache" / "calibration").glob("*.npy")
    tokens.write_bytes(tokens.read_bytes()[:40])
    again = compile(recipe, tmp_path / "again")
    assert weights_sha256(again) == weights_sha256(tmp_path / "first")
    (losses,) = (tmp_path / "cache" / "calibration").glob("*/losses.json")
    content = losses.read_text()
    losses.write_text("{")
    with pytest.raises(BuildError, match=f"{losses.parent} is damaged .*remove that folder"):
        compile(recipe, tmp_path / "named")
    losses.write_text(content)
    matrix = losses.parent / "layers.0.mlp.down_proj.weight.safetensors"
    matrix.write_bytes(matrix.read_bytes()[:100])
    with pytest.raises(BuildError, match=f"{losses.parent} is damaged"):
        compile(recipe, tmp_path / "named")
    assert not (tmp_path / "named").exists()


def test_distillation_that_memory_cant_hold_is_refused_before_anything_is_sampled(
    save_recipe: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scheme = {"scheme": "w4a16", "group_size": 32}
    recipe = save_recipe(quantisation=scheme, distillation={"steps": 5})
    monkeypatch.setattr(calibrate, "available_bytes", lambda: 1_000)
    with pytest.raises(BuildError, match=r"GB of memory are needed .* and 0\.0 GB are free"):
        compile(recipe, tmp_path / "engine")
    assert not (tmp_path / "cache" / "calibration").exists()
