"""Recipes to begin with, and what comes of changing them."""

import copy
from pathlib import Path
from typing import Any

import pytest
import yaml

from llmbuild.builder.recipe.recipe import load_recipe
from llmbuild.errors import RecipeError

HASH = "0123456789abcdef" * 4
MINIMAL: dict[str, Any] = {
    "version": 1,
    "name": "tiny",
    "model": {"source": "path:model"},
    "precision": "fp32",
}


def write(folder: Path, content: object) -> Path:
    path = folder / "recipe.yaml"
    path.write_text(content if isinstance(content, str) else yaml.safe_dump(content))
    return path


def changed(change: dict[Any, Any]) -> dict[str, Any]:
    """MINIMAL with keys set; a section is merged, and None removes a key."""
    content = copy.deepcopy(MINIMAL)
    for key, value in change.items():
        if isinstance(value, dict) and isinstance(content.get(key), dict):
            content[key].update(value)
        elif value is None:
            del content[key]
        else:
            content[key] = value
    return content


def problems(folder: Path, content: object, *overrides: str) -> list[str]:
    """The lines of the RecipeError that loading raises, without its heading."""
    with pytest.raises(RecipeError) as refused:
        load_recipe(write(folder, content), overrides)
    heading, *lines = str(refused.value).split("\n  ")
    assert heading.startswith(f"recipe {folder / 'recipe.yaml'}")
    return lines


RTX: dict[str, Any] = {"target": "tensorrt-rtx", "precision": "fp16"}
TENSORRT: dict[str, Any] = {"target": "tensorrt", "precision": "fp16"}


def resolve(folder: Path, content: object, *overrides: str, max_position: int = 4096) -> Any:
    return load_recipe(write(folder, content), overrides).resolve(max_position)
