"""A plan file: overrides of precision that `llmbuild plan` found, which a recipe takes in."""

from pathlib import Path
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, ValidationError

from llmbuild.builder.recipe.kv_cache import KVOverride
from llmbuild.builder.recipe.problems import problem_lines
from llmbuild.builder.recipe.quantisation import Override
from llmbuild.builder.recipe.section import Section, listed
from llmbuild.builder.recipe.yaml_text import read_recipe
from llmbuild.errors import RecipeError


class PrecisionPlan(Section):
    """The overrides are those of a recipe's sections of the same names. measured: what they were
    chosen by, for people to read."""

    version: int = Field(ge=1, le=1, description="1")
    kv_cache: Annotated[tuple[KVOverride, ...], BeforeValidator(listed)] = Field(
        default=(),
        description="a list of mappings with the keys match and dtype, as kv_cache.overrides",
    )
    quantisation: Annotated[tuple[Override, ...], BeforeValidator(listed)] = Field(
        default=(),
        description="a list of mappings with the keys match and scheme, and where the scheme has "
        "a grid group_size, symmetric, method",
    )
    measured: dict[str, Any] = Field(default={}, description="a mapping")


def read_plan(path: Path) -> PrecisionPlan:
    """Raises RecipeError, which lists every problem of the file, one a line."""
    if not path.exists():
        raise RecipeError(f"plan {path}: No such file; `plan` is a path from the recipe's folder")
    content = read_recipe(path, "plan")
    try:
        return PrecisionPlan.model_validate(content)
    except ValidationError as error:
        lines = problem_lines(error, PrecisionPlan, content)
        raise RecipeError("\n  ".join([f"plan {path}:", *lines])) from error
