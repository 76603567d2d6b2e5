"""`llmbuild compile`."""

from pathlib import Path

import click

from llmbuild.builder.recipe.options import recipe_argument_and_overrides


@click.command("compile")
@recipe_argument_and_overrides
@click.option(
    "-o",
    "--out",
    metavar="DIR",
    type=click.Path(path_type=Path),
    help="Where to publish the engine.  [default: engines/NAME, NAME being the recipe's]",
)
@click.option(
    "--dump",
    "dump_dir",
    metavar="DIR",
    type=click.Path(path_type=Path, file_okay=False),
    help="Write the step graph after each pass, as ONNX, into DIR.",
)
def compile_command(
    recipe_path: Path, overrides: tuple[str, ...], out: Path | None, dump_dir: Path | None
) -> None:
    """Compile RECIPE to an engine; prints the engine's path."""
    # Here, not above: the list of commands must not need what only builds need.
    from llmbuild.builder.compile import compile
    from llmbuild.builder.sources.progress import stderr_progress

    progress = stderr_progress()
    click.echo(compile(recipe_path, out, overrides, dump_dir=dump_dir, progress=progress))
