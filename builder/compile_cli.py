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
@click.option(
    "--rank",
    type=int,
    help="Compile this rank alone, of an engine of several; the last one publishes them all.",
)
def compile_command(
    recipe_path: Path,
    overrides: tuple[str, ...],
    out: Path | None,
    dump_dir: Path | None,
    rank: int | None,
) -> None:
    """Compile RECIPE to an engine; prints the engine's path once it is published."""
    if rank is not None and dump_dir is not None:
        raise click.UsageError("--dump writes the whole model's graph; leave --rank out for it")
    # Here, not above: the list of commands must not need what only builds need.
    from llmbuild.builder.compile import compile, compile_rank
    from llmbuild.builder.sources.progress import stderr_progress

    progress = stderr_progress()
    if rank is None:
        click.echo(compile(recipe_path, out, overrides, dump_dir=dump_dir, progress=progress))
        return
    published = compile_rank(rank, recipe_path, out, overrides, progress=progress)
    if published is not None:
        click.echo(published)
