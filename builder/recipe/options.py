"""What every command that takes a recipe has in common."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

Command = TypeVar("Command", bound=Callable[..., Any])


def recipe_argument_and_overrides(command: Command) -> Command:
    """Give a click command the parameters `recipe_path: Path` and `overrides: tuple[str, ...]`."""
    argument = click.argument("recipe_path", metavar="RECIPE", type=click.Path(path_type=Path))
    option = click.option(
        "--set",
        "overrides",
        metavar="KEY.PATH=VALUE",
        multiple=True,
        help="Set one key of the recipe, as in --set precision=bf16; repeatable.",
    )
    return argument(option(command))
