"""Recipes that are accepted: how they are completed, and that the result leaves nothing open."""

from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from recipe_texts import HASH, MINIMAL, RTX, TENSORRT, changed, resolve, write

from llmbuild.builder.recipe.problems import known_keys
from llmbuild.builder.recipe.recipe import (
    DEFAULT_MAX_SEQUENCE_LENGTH,
    Recipe,
    ResolvedRecipe,
    effective_yaml,
    load_recipe,
)
from llmbuild.builder.recipe.target import SCHEMES
from llmbuild.errors import RecipeError
from llmbuild.runtime.target import CPU


def test_minimal_recipe_gets_the_defaults(tmp_path: Path) -> None:
    resolved = resolve(tmp_path, MINIMAL)
    assert yaml.safe_load(effective_yaml(resolved)) == {
        **MINIMAL,
        "target": {"kind": "cpu", "isa": ["native"]},
        "parallel": {"tp": 1, "pp": 1},
        "limits": {"max_sequence_length": 2048, "max_step_tokens": 512, "max_sequences": 32},
        "quantisation": {"scheme": "none", "overrides": [], "rotation": False},
        "kv_cache": {"dtype": "fp32", "block_size": 16, "overrides": []},
        "buckets": [1, 2, 4, 8],
        "calibration": {"data": "self", "sequences": 32, "length": 512, "seed": 0},
        "verify": {"tolerance": 1e-4},
    }


def test_bf16_sets_the_kv_dtype_and_the_tolerance(tmp_path: Path) -> None:
    resolved = resolve(tmp_path, changed({"precision": "bf16"}))
    assert resolved.kv_cache.dtype == "bf16"
    assert resolved.verify.tolerance == 2e-2


@pytest.mark.parametrize(
    ("scheme", "group_size", "tolerance"),
    [
        ("w4a8", 64, 1e-1),
        ("w8a8", "row", 1e-1),
        ("w8a8-static", "row", 1e-1),
        ("w4a16", 64, 2e-2),
        ("w8a16", "row", 2e-2),
        ("stored-a8", None, 1e-1),
        ("stored-a16", None, 2e-2),
    ],
)
@pytest.mark.parametrize("in_short", [True, False])
def test_a_scheme_sets_its_groups_and_the_tolerance(
    tmp_path: Path, scheme: str, group_size: Any, tolerance: float, in_short: bool
) -> None:
    """Of 4 bits 64 columns share a scale, of 8 a row; what is stored has nothing to choose."""
    given = scheme if in_short else {"scheme": scheme}
    resolved = resolve(tmp_path, changed({"quantisation": given, "precision": "bf16"}))
    found = resolved.quantisation
    symmetric = None if scheme.startswith("stored") else True
    assert (found.scheme, found.group_size, found.symmetric) == (scheme, group_size, symmetric)
    assert resolved.verify.tolerance == tolerance


def test_a_given_grid_and_tolerance_are_kept(tmp_path: Path) -> None:
    for group_size, symmetric in ((32, False), (4096, True), ("row", False)):
        section = {"scheme": "w4a8", "group_size": group_size, "symmetric": symmetric}
        content = changed({"quantisation": section, "verify": {"tolerance": 0.01}})
        resolved = resolve(tmp_path, content)
        found = resolved.quantisation
        assert (found.group_size, found.symmetric) == (group_size, symmetric)
        assert resolved.verify.tolerance == 0.01


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_int8_kv_allows_for_keys_and_values_rounded_to_either_side(
    tmp_path: Path, precision: str
) -> None:
    content = changed({"precision": precision, "kv_cache": {"dtype": "int8"}})
    assert resolve(tmp_path, content).verify.tolerance == 5e-2


def test_defaults_are_cut_to_fit_what_is_given(tmp_path: Path) -> None:
    resolved = resolve(tmp_path, changed({"limits": {"max_step_tokens": 5}}), max_position=7)
    assert resolved.limits.max_sequences == 5
    assert resolved.limits.max_sequence_length == 7
    assert resolved.kv_cache.block_size == 7
    assert resolved.buckets == (1, 2, 4)


def test_empty_section_is_all_defaults(tmp_path: Path) -> None:
    text = yaml.safe_dump(MINIMAL) + "limits:\nkv_cache:\nverify:\nparallel:\n"
    assert resolve(tmp_path, text) == resolve(tmp_path, MINIMAL)


def test_sequence_longer_than_the_model_is_refused(tmp_path: Path) -> None:
    content = changed({"limits": {"max_sequence_length": 129}})
    assert resolve(tmp_path, content, max_position=129).limits.max_sequence_length == 129
    with pytest.raises(RecipeError, match=r"limits.max_sequence_length: given 129; .* 128 pos"):
        resolve(tmp_path, content, max_position=128)


def test_block_longer_than_the_models_positions_is_refused(tmp_path: Path) -> None:
    content = changed({"kv_cache": {"block_size": 64}})
    assert resolve(tmp_path, content, max_position=64).kv_cache.block_size == 64
    with pytest.raises(RecipeError, match=r"kv_cache.block_size: given 64; .*length, 63"):
        resolve(tmp_path, content, max_position=63)


def test_one_level_and_a_list_of_one_are_the_same(tmp_path: Path) -> None:
    word, default, level, listed = (
        resolve(tmp_path, changed({"target": target}))
        for target in (
            {"kind": "cpu"},
            {"isa": "native"},
            {"kind": "cpu", "isa": "native"},
            {"kind": "cpu", "isa": ["native"]},
        )
    )
    assert word == default == level == listed == resolve(tmp_path, changed({"target": "cpu"}))


@st.composite
def quantisations(draw: st.DrawFn) -> dict[str, Any]:
    """A scheme with either key of its grid given or not."""
    scheme = draw(st.sampled_from(SCHEMES[CPU]))
    grid = {
        "group_size": draw(st.sampled_from([32, 64, 96, 4096, "row"])),
        "symmetric": draw(st.booleans()),
    }
    smoothing = ["smoothquant"] if "a8" in scheme else []
    grid["method"] = draw(st.sampled_from(["rtn", "gptq", "awq", *smoothing]))
    has_grid = scheme.startswith("w")
    keys = draw(st.sets(st.sampled_from(sorted(grid)))) if has_grid else set()
    return {"scheme": scheme} | {key: grid[key] for key in keys}


@st.composite
def recipes(draw: st.DrawFn) -> tuple[dict[str, Any], int]:
    """A valid recipe with any of its keys given, and a model's positions."""
    max_position = draw(st.integers(1, 5000))
    length = draw(st.integers(1, max_position))
    step_tokens = draw(st.integers(1, 2000))
    sequences = draw(st.integers(1, step_tokens))
    buckets = {1, *draw(st.sets(st.integers(1, min(sequences, 64))))}
    optional: dict[str, Any] = {
        "target": draw(st.sampled_from(["cpu", {"kind": "cpu", "isa": ["x86-64-v4", "x86-64"]}])),
        "kv_cache": {
            "dtype": draw(st.sampled_from(["fp32", "bf16", "int8", "int8-static", "int4"])),
            "overrides": draw(st.sampled_from([[], [{"match": "*.k.*", "dtype": "int4"}]])),
            "block_size": draw(st.integers(1, min(256, length))),
        },
        "limits": {
            "max_sequence_length": length,
            "max_step_tokens": step_tokens,
            "max_sequences": sequences,
        },
        "quantisation": draw(quantisations()),
        "buckets": sorted(buckets),
        "calibration": {
            "data": "a.txt",
            "sequences": 3,
            "length": min(length, DEFAULT_MAX_SEQUENCE_LENGTH),  # the limit where none is given
            "seed": 7,
        },
        "verify": {"tolerance": draw(st.floats(0, 1, exclude_min=True))},
    }
    given_keys = draw(st.sets(st.sampled_from(sorted(optional))))
    if given_keys & {"kv_cache", "buckets"}:
        given_keys.add("limits")
    model = {"source": "path:model", "sha256": draw(st.sampled_from([HASH, {"a.json": HASH}]))}
    precision = draw(st.sampled_from(["fp32", "bf16"]))
    content = {**MINIMAL, "model": model, "precision": precision}
    return content | {key: optional[key] for key in given_keys}, max_position


@given(recipes())
def test_effective_recipe_loads_and_resolves_to_itself(
    tmp_path_factory: pytest.TempPathFactory, case: tuple[dict[str, Any], int]
) -> None:
    content, max_position = case
    folder = tmp_path_factory.getbasetemp()
    resolved = resolve(folder, content, max_position=max_position)
    printed = effective_yaml(resolved)
    assert resolve(folder, printed, max_position=max_position) == resolved
    written = yaml.safe_load(printed)
    for section, values in content.items():
        if section != "target":
            assert written[section] == values or written[section] == written[section] | values


def test_resolved_recipe_leaves_nothing_open(tmp_path: Path) -> None:
    resolved = resolve(tmp_path, changed({"quantisation": "w4a8"}))
    assert isinstance(resolved, ResolvedRecipe)
    open_keys = [
        key
        for key in known_keys(ResolvedRecipe)
        if key not in ("model.sha256", "plan", "target.capabilities")
        and not key.startswith(("gate", "distillation"))
        and _value(resolved, key) is None
    ]
    assert open_keys == []


def test_recipe_for_a_gpu_resolves_to_itself(tmp_path: Path) -> None:
    resolved = resolve(tmp_path, changed(RTX), "limits.max_sequence_length=70")
    assert resolved.target.isa is None
    assert resolved.target.capabilities == ("8.0", "8.6", "8.9", "12.0")
    assert (resolved.kv_cache.dtype, resolved.kv_cache.block_size) == ("fp16", 70)
    again = tmp_path / "again.yaml"
    again.write_text(effective_yaml(resolved))
    assert load_recipe(again).resolve(1000) == resolved


@pytest.mark.parametrize("part", [False, True])
def test_fp8_is_for_the_gpus_that_have_it(tmp_path: Path, part: bool) -> None:
    """Capabilities that aren't given are cut to those; a scale a row, and no method by default."""
    quantisation: Any = "fp8_w8a8"
    if part:
        overrides = [{"match": "*", "scheme": "fp8_w8a8", "method": "smoothquant"}]
        quantisation = {"scheme": "w8a16", "overrides": overrides}
    resolved = resolve(tmp_path, changed(RTX | {"quantisation": quantisation}))
    assert resolved.target.capabilities == ("8.9", "12.0")
    assert resolved.verify.tolerance == 0.4
    chosen = resolved.quantisation.overrides[0] if part else resolved.quantisation
    assert (chosen.group_size, chosen.symmetric) == ("row", True)
    assert chosen.method == ("smoothquant" if part else "rtn")
    again = tmp_path / "again.yaml"
    again.write_text(effective_yaml(resolved))
    assert load_recipe(again).resolve(4096) == resolved


def test_fp8_may_be_for_the_gpu_at_hand(tmp_path: Path) -> None:
    resolved = resolve(tmp_path, changed(TENSORRT | {"quantisation": "fp8_w8a8"}))
    assert resolved.target.capabilities == ("native",)
    assert resolved.verify.tolerance == 0.4


def test_a_kv_cache_of_tensorrt_may_be_fp8(tmp_path: Path) -> None:
    resolved = resolve(tmp_path, changed(TENSORRT | {"kv_cache": {"dtype": "fp8"}}))
    assert (resolved.kv_cache.dtype, resolved.verify.tolerance) == ("fp8", 0.2)


def test_recipe_for_the_gpu_at_hand_resolves_to_itself(tmp_path: Path) -> None:
    recipe = changed(TENSORRT | {"kv_cache": {"dtype": "int8"}})
    resolved = resolve(tmp_path, recipe, "limits.max_sequence_length=70")
    assert (resolved.target.isa, resolved.target.capabilities) == (None, ("native",))
    assert (resolved.kv_cache.dtype, resolved.kv_cache.block_size) == ("int8", 16)
    assert resolved.verify.tolerance == 0.05
    again = tmp_path / "again.yaml"
    again.write_text(effective_yaml(resolved))
    assert load_recipe(again).resolve(1000) == resolved


def test_recipe_is_frozen(tmp_path: Path) -> None:
    recipe = load_recipe(write(tmp_path, MINIMAL))
    with pytest.raises(ValueError, match="frozen"):
        recipe.limits.max_step_tokens = 3


RECIPES = sorted(
    path.stem
    for path in (Path(__file__).parents[3] / "recipes").glob("*.yaml")
    if not path.stem.endswith(".plan")
)


@pytest.mark.parametrize("name", RECIPES)
def test_shipped_recipe_loads_under_its_own_name(name: str, checkout: Path) -> None:
    recipe = load_recipe(checkout / "recipes" / f"{name}.yaml")
    assert recipe.name == name
    precisions = {"fp32": "fp32", "rtx": "fp16", "tensorrt": "fp16"}
    assert recipe.resolve(131072).precision == precisions.get(name.split("-")[-1], "bf16")


def test_reference_has_a_row_for_every_key(checkout: Path) -> None:
    reference = (checkout / "docs" / "recipe.md").read_text()
    table = reference.partition("## Keys")[2].partition("\n## ")[0]
    rows = [line.split("|")[1].strip(" `") for line in table.splitlines() if "| `" in line[:3]]
    leaves = {key for key in known_keys(Recipe) if not any(_below(key))}
    assert sorted(rows) == sorted(leaves)


def _below(key: str) -> list[str]:
    return [other for other in known_keys(Recipe) if other.startswith(f"{key}.")]


def _value(record: Any, key: str) -> Any:
    for name in key.split("."):
        record = getattr(record, name)
    return record
