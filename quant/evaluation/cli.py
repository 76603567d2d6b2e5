"""`llmbuild eval`."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click
import msgspec

from llmbuild.quant.evaluation.defaults import (
    COMPARE_WINDOWS,
    CONTEXT,
    PERPLEXITY_WINDOWS,
    RETRIEVAL_CONTEXTS,
    RETRIEVAL_SAMPLES,
)

Command = TypeVar("Command", bound=Callable[..., Any])


def _lengths(ctx: click.Context, parameter: click.Parameter, given: str | None) -> list[int] | None:
    """Whole numbers above 0 with commas between them."""
    if given is None:
        return None
    words = [word.strip() for word in given.split(",")]
    if not all(word.isdecimal() and int(word) for word in words):
        raise click.BadParameter(f"{given!r} isn't a list of whole numbers such as 512,2048")
    return [int(word) for word in words]


_engine = click.argument("engine_dir", metavar="DIR", type=click.Path(path_type=Path))
_text = click.option(
    "--text",
    "text_path",
    metavar="FILE",
    required=True,
    type=click.Path(path_type=Path),
    help="UTF-8 text to measure on.",
)
_context = click.option("--context", default=CONTEXT, show_default=True, help="Tokens of a window.")
_threads = click.option(
    "--threads",
    type=int,
    default=None,
    help="Threads that compute.  [default: the processors it may use]",
)
_json = click.option("--json", "as_json", is_flag=True, help="End with one line of JSON.")


def _windows(default: int) -> Callable[[Command], Command]:
    return click.option(
        "--windows", default=default, show_default=True, help="Windows from the text's start."
    )


@click.group("eval")
def eval_group() -> None:
    """Measure what an engine's answers are worth."""


@eval_group.command("perplexity")
@_engine
@_text
@_context
@_windows(PERPLEXITY_WINDOWS)
@_threads
@_json
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
    from llmbuild.quant.evaluation.perplexity import measure_perplexity

    result = measure_perplexity(
        engine_dir, text_path, context=context, windows=windows, num_threads=threads
    )
    if as_json:
        _echo_json(result)
    else:
        click.echo(
            f"perplexity {result.perplexity:.4f} over {result.num_scored_tokens} tokens "
            f"({result.windows} windows of {result.context}) in {result.seconds:.1f} s"
        )


@eval_group.command("compare")
@_engine
@click.argument("reference_dir", metavar="REFERENCE_DIR", type=click.Path(path_type=Path))
@_text
@_context
@_windows(COMPARE_WINDOWS)
@_threads
@_json
def compare_command(
    engine_dir: Path,
    reference_dir: Path,
    text_path: Path,
    context: int,
    windows: int,
    threads: int | None,
    as_json: bool,
) -> None:
    """Measure how far an engine's predictions are from a reference engine's.

    Both predict the second half of each window of a text.
    """
    from llmbuild.quant.evaluation.compare import compare_engines

    result = compare_engines(
        engine_dir,
        reference_dir,
        text_path,
        context=context,
        windows=windows,
        num_threads=threads,
    )
    if as_json:
        _echo_json(result)
    else:
        click.echo(
            f"KL {result.kl_nats:.6f} nats a token, the same likeliest token for "
            f"{result.agreement:.2%}; perplexity {result.perplexity:.4f}, of the reference "
            f"{result.reference_perplexity:.4f}, ratio {result.perplexity_ratio:.5f}; over "
            f"{result.num_scored_tokens} tokens ({result.windows} windows of {result.context}) "
            f"in {result.seconds:.1f} s"
        )


@eval_group.command("retrieval")
@_engine
@click.option(
    "--contexts",
    metavar="N,N,...",
    callback=_lengths,
    help="Tokens of each context.  [default: those of "
    f"{','.join(map(str, RETRIEVAL_CONTEXTS))} that the engine can run]",
)
@click.option(
    "--samples",
    default=RETRIEVAL_SAMPLES,
    show_default=True,
    help="Facts in each place of each context.",
)
@click.option("--seed", default=0, show_default=True, help="Of the texts and the facts.")
@_threads
@_json
def retrieval_command(
    engine_dir: Path,
    contexts: list[int] | None,
    samples: int,
    seed: int,
    threads: int | None,
    as_json: bool,
) -> None:
    """Measure how well an engine finds facts again in long contexts.

    They stand at the start and in the middle of texts that are made from the seed.
    """
    from llmbuild.quant.evaluation.retrieval import measure_retrieval

    result = measure_retrieval(
        engine_dir, contexts=contexts, samples=samples, seed=seed, num_threads=threads
    )
    if as_json:
        _echo_json(result)
        return
    for row in result.rows:
        click.echo(
            f"context {row.context:>6}, {row.place:<6} {row.accuracy:7.2%} of {row.samples} found, "
            f"log probability {row.log_probability:.4f} a token"
        )
    click.echo(
        f"accuracy {result.accuracy:.2%}, log probability {result.log_probability:.4f} a token, "
        f"in {result.seconds:.1f} s"
    )


def _echo_json(result: object) -> None:
    click.echo(msgspec.json.encode(result).decode())
