"""`llmbuild fetch`."""

from pathlib import Path

import click

from llmbuild.builder.recipe.options import recipe_argument_and_overrides


@click.command("fetch")
@recipe_argument_and_overrides
def fetch_command(recipe_path: Path, overrides: tuple[str, ...]) -> None:
    """Fetch the model of RECIPE, check it, and print its local path."""
    # Here, not above: the list of commands must not need what only builds need.
    from llmbuild.builder.recipe.recipe import load_recipe
    from llmbuild.builder.sources import fetch, parse_source
    from llmbuild.builder.sources.progress import stderr_progress
    from llmbuild.cache import cache_root

    model = load_recipe(recipe_path, overrides).model
    path = fetch(
        parse_source(model.source),
        model.sha256,
        base_dir=recipe_path.parent,
        cache_dir=cache_root(),
        progress=stderr_progress(),
    )
    click.echo(path)
