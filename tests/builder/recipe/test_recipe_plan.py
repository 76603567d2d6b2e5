"""A recipe takes in a plan's overrides: behind its own, and as data of the engine's recipe."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from llmbuild.builder.recipe.plan_file import read_plan
from llmbuild.builder.recipe.recipe import effective_yaml, load_recipe
from llmbuild.errors import RecipeError

RECIPE: dict[str, Any] = {
    "version": 1,
    "name": "mixed",
    "model": {"source": "path:model"},
    "precision": "bf16",
    "quantisation": {
        "scheme": "w4a8",
        "overrides": [{"match": "*.v_proj.weight", "scheme": "w8a16"}],
    },
    "kv_cache": {"dtype": "int4", "overrides": [{"match": "layers.0.k.*", "dtype": "bf16"}]},
    "plan": "plans/mixed.yaml",
}
PLAN: dict[str, Any] = {
    "version": 1,
    "kv_cache": [
        {"match": "layers.0.k.*", "dtype": "int4"},
        {"match": "layers.0.v.*", "dtype": "int8"},
    ],
    "quantisation": [{"match": "layers.0.mlp.*", "scheme": "w8a8"}],
    "measured": {"kv_cache": {"kl_nats": {"layers.0.k.*": {"int8": 1e-5}}}},
}


def write(folder: Path, recipe: dict[str, Any], plan: Any) -> Path:
    (folder / "plans").mkdir(exist_ok=True)
    text = plan if isinstance(plan, str) else yaml.safe_dump(plan)
    (folder / "plans" / "mixed.yaml").write_text(text)
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(recipe))
    return path


def test_overrides_of_the_plan_stand_behind_the_recipes_own(tmp_path: Path) -> None:
    recipe = load_recipe(write(tmp_path, RECIPE, PLAN))
    assert [(o.match, o.dtype) for o in recipe.kv_cache.overrides] == [
        ("layers.0.k.*", "bf16"),
        ("layers.0.k.*", "int4"),
        ("layers.0.v.*", "int8"),
    ]
    assert [(o.match, o.scheme) for o in recipe.quantisation.overrides] == [
        ("*.v_proj.weight", "w8a16"),
        ("layers.0.mlp.*", "w8a8"),
    ]


def test_effective_recipe_holds_the_overrides_and_needs_no_file(tmp_path: Path) -> None:
    resolved = load_recipe(write(tmp_path, RECIPE, PLAN)).resolve(2048)
    printed = effective_yaml(resolved)
    assert "plan" not in yaml.safe_load(printed)
    alone = tmp_path / "alone"
    alone.mkdir()
    (alone / "recipe.yaml").write_text(printed)
    assert load_recipe(alone / "recipe.yaml").resolve(2048) == resolved
    assert [o.match for o in resolved.quantisation.overrides] == [
        "*.v_proj.weight",
        "layers.0.mlp.*",
    ]
    assert resolved.quantisation.overrides[1].group_size == "row"  # the scheme's default


def test_plan_can_be_named_and_left_out_on_the_command_line(tmp_path: Path) -> None:
    path = write(tmp_path, RECIPE, PLAN)
    assert len(load_recipe(path, ["plan=null"]).kv_cache.overrides) == 1
    plain = write(tmp_path, {key: RECIPE[key] for key in RECIPE if key != "plan"}, PLAN)
    assert len(load_recipe(plain, ["plan=plans/mixed.yaml"]).kv_cache.overrides) == 3


def test_tolerance_follows_what_the_plan_rounds(tmp_path: Path) -> None:
    bare = {key: RECIPE[key] for key in ("version", "name", "model", "precision", "plan")}
    plan = {"version": 1, "kv_cache": [{"match": "*", "dtype": "int8"}]}
    with_plan = load_recipe(write(tmp_path, bare, plan)).resolve(2048)
    without = load_recipe(write(tmp_path, bare, {"version": 1})).resolve(2048)
    assert with_plan.verify.tolerance > without.verify.tolerance


BAD: dict[str, tuple[Any, list[str]]] = {
    "another version": (PLAN | {"version": 2}, ["version: given 2; allowed: 1"]),
    "no version": ({"kv_cache": []}, ["version: missing; give 1"]),
    "unknown key": (PLAN | {"weights": []}, ["weights: unknown key"]),
    "KV dtype": (
        {"version": 1, "kv_cache": [{"match": "*", "dtype": "int3"}]},
        ["kv_cache: given [{dtype: int3", "match and dtype"],
    ),
    "scheme": (
        {"version": 1, "quantisation": [{"match": "*", "scheme": "w3a8"}]},
        ["quantisation: given [{match:", "match and scheme"],
    ),
    "unknown key of an override": (
        {"version": 1, "kv_cache": [{"match": "*", "dtype": "int8", "layer": 3}]},
        ["kv_cache: given", "match and dtype"],
    ),
    "no mapping": ("- 1\n", ["it holds a list; a plan is a mapping"]),
    "no YAML": ("version: [1\n", ["bad YAML"]),
    "empty": ("", ["it is empty; a plan starts with `version: 1`"]),
    "a key twice": ("version: 1\nversion: 1\n", ["given twice"]),
}


@pytest.mark.parametrize(("content", "said"), BAD.values(), ids=BAD.keys())
def test_bad_plan_is_refused_with_what_is_allowed(
    tmp_path: Path, content: Any, said: list[str]
) -> None:
    path = write(tmp_path, RECIPE, content)
    with pytest.raises(RecipeError) as refused:
        load_recipe(path)
    for words in (f"plan {tmp_path / 'plans' / 'mixed.yaml'}", *said):
        assert words in str(refused.value)


def test_all_problems_of_a_plan_are_told_together(tmp_path: Path) -> None:
    write(tmp_path, RECIPE, {"version": 3, "kvcache": [], "measured": 1})
    with pytest.raises(RecipeError) as refused:
        read_plan(tmp_path / "plans" / "mixed.yaml")
    assert [line.strip() for line in str(refused.value).splitlines()[1:]] == [
        "version: given 3; allowed: 1",
        "measured: given 1; allowed: a mapping",
        "kvcache: unknown key; the nearest known key is kv_cache",
    ]


def test_absent_plan_is_named(tmp_path: Path) -> None:
    path = write(tmp_path, RECIPE | {"plan": "other.yaml"}, PLAN)
    with pytest.raises(RecipeError, match=r"plan .*other\.yaml: No such file"):
        load_recipe(path)


@pytest.mark.parametrize("given", ["", 3, ["a.yaml"]])
def test_plan_key_is_a_path(tmp_path: Path, given: Any) -> None:
    path = write(tmp_path, RECIPE | {"plan": given}, PLAN)
    with pytest.raises(RecipeError, match=r"plan: given .*; allowed: a file that `llmbuild plan`"):
        load_recipe(path)


def test_what_the_plan_and_the_recipe_contradict_each_other_in_is_told(tmp_path: Path) -> None:
    plan = PLAN | {"kv_cache": [{"match": "layers.0.k.*", "dtype": "fp16"}]}
    with pytest.raises(RecipeError, match=r"(?s)^recipe mixed with its plan plans/mixed\.yaml:.*k"):
        load_recipe(write(tmp_path, RECIPE, plan))
    rotated = {"scheme": "w8a8", "rotation": True}
    plan = PLAN | {"quantisation": [{"match": "layers.0.mlp.*", "scheme": "stored-a8"}]}
    with pytest.raises(RecipeError, match=r"(?s)with its plan.*quantisation\.rotation: given true"):
        load_recipe(write(tmp_path, RECIPE | {"quantisation": rotated}, plan))
