"""`llmbuild eval`."""

from pathlib import Path

import click
import msgspec


@click.group("eval")
def eval_group() -> None:
    """Measure what an engine's answers are worth."""


@eval_group.command("perplexity")
@click.argument("engine_dir", metavar="DIR", type=click.Path(path_type=Path))
@click.option(
    "--text",
    "text_path",
    metavar="FILE",
    required=True,
    type=click.Path(path_type=Path),
    help="UTF-8 text to measure on.",
)
@click.option("--context", default=512, show_default=True, help="Tokens of a window.")
@click.option("--windows", default=64, show_default=True, help="Windows from the text's start.")
@click.option(
    "--threads",
    type=int,
    default=None,
    help="Threads that compute.  [default: the processors it may use]",
)
@click.option("--json", "as_json", is_flag=True, help="End with one line of JSON.")
def perplexity_command(
    engine_dir: Path,
    text_path: Path,
    context: int,
    windows: int,
    threads: int | None,
    as_json: bool,
) -> None:
    """Measure an engine's perplexity over a text.

    The second half of each window is scored, with the first as its context.
    """
    from llmbuild.quant.evaluate import evaluate_engine

    result = evaluate_engine(
        engine_dir, text_path, context=context, windows=windows, num_threads=threads
    )
    if as_json:
        click.echo(msgspec.json.encode(result).decode())
    else:
        click.echo(
            f"perplexity {result.perplexity:.4f} over {result.num_scored_tokens} tokens "
            f"({result.windows} windows of {result.context}) in {result.seconds:.1f} s"
        )
