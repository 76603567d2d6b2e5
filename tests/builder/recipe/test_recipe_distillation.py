"""The recipe's distillation: what it resolves to, and what is refused before any work."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from llmbuild.builder.recipe.recipe import Recipe, effective_yaml, load_recipe
from llmbuild.errors import RecipeError

MINIMAL = {"version": 1, "name": "m", "model": {"source": "path:m"}, "precision": "bf16"}


def load(tmp_path: Path, **keys: Any) -> Recipe:
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(MINIMAL | {"quantisation": "w4a16"} | keys))
    return load_recipe(path)


@pytest.mark.parametrize(
    ("given", "batch"),
    [({"steps": 3}, 8), ({"steps": 3, "sequences": 5}, 5), ({"steps": 3, "batch": 2}, 2)],
)
def test_the_default_batch_is_cut_to_what_is_there(
    tmp_path: Path, given: dict[str, int], batch: int
) -> None:
    resolved = load(tmp_path, distillation=given).resolve(64)
    assert resolved.distillation is not None
    assert resolved.distillation.batch == batch
    path = tmp_path / "effective.yaml"
    path.write_text(effective_yaml(resolved))
    assert load_recipe(path).resolve(64) == resolved


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"distillation": {}}, "distillation.steps: missing"),
        ({"distillation": {"steps": 0}}, "distillation.steps: given 0; allowed: an integer from 1"),
        (
            {"distillation": {"steps": 1, "sequences": 4, "batch": 5}},
            "distillation.batch: given 5; at most distillation.sequences, 4, is allowed",
        ),
        (
            {"distillation": {"steps": 1}, "quantisation": "none"},
            "distillation: given .*; no matrix that it could train is rounded by gptq",
        ),
        (
            {"distillation": {"steps": 1}, "quantisation": "w8a8"},
            "no matrix that it could train is rounded by gptq",
        ),
        (
            {"distillation": {"steps": 1}, "quantisation": "stored-a8"},
            "no matrix that it could train",
        ),
        (
            {
                "distillation": {"steps": 1},
                "target": "tensorrt-rtx",
                "quantisation": {"scheme": "fp8_w8a8", "method": "smoothquant"},
            },
            "distillation: given .*; it trains whole numbers alone, and quantisation asks for FP8",
        ),
    ],
)
def test_what_fits_nothing_is_refused(tmp_path: Path, keys: dict[str, Any], said: str) -> None:
    with pytest.raises(RecipeError, match=said):
        load(tmp_path, **keys)


@pytest.mark.parametrize(
    "keys",
    [
        {"quantisation": "w8a8-static"},
        {"quantisation": {"scheme": "w8a8", "overrides": [{"match": "*", "scheme": "w4a8"}]}},
    ],
)
def test_any_method_that_calibrates_is_enough(tmp_path: Path, keys: dict[str, Any]) -> None:
    assert load(tmp_path, distillation={"steps": 1}, **keys).distillation is not None
