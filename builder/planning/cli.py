"""`llmbuild plan`."""

import math
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from llmbuild.builder.recipe.options import recipe_argument_and_overrides

if TYPE_CHECKING:
    from llmbuild.builder.planning.part import Part


class _NumberRange(click.FloatRange):
    """Numbers of a range; click itself takes nan for one."""

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        number = float(super().convert(value, param, ctx))
        if math.isnan(number):
            self.fail(f"{value} is not a number.", param, ctx)
        return number


_RATIO = _NumberRange(min=0, max=1, min_open=True)
_KL = _NumberRange(min=0)
_SEQUENCES = 4


@click.command("plan")
@recipe_argument_and_overrides
@click.option(
    "-o",
    "--out",
    required=True,
    metavar="FILE",
    type=click.Path(path_type=Path),
    help="Where to write the plan.",
)
@click.option(
    "--kv-ratio", type=_RATIO, help="Most that the KV cache may take of its bytes in bf16."
)
@click.option("--kv-max-kl", type=_KL, help="Most KL to expect of the KV cache, in nats a token.")
@click.option(
    "--weight-ratio",
    type=_RATIO,
    help="Most that linears may take of their bytes in the recipe's precision.",
)
@click.option("--weight-max-kl", type=_KL, help="Most KL to expect of linears, in nats a token.")
@click.option(
    "--sequences",
    type=click.IntRange(min=1),
    default=_SEQUENCES,
    show_default=True,
    help="How many of the recipe's calibration sequences to measure on.",
)
@click.option("--per-head", is_flag=True, help="Choose for each KV head, not for whole layers.")
def plan_command(
    recipe_path: Path,
    overrides: tuple[str, ...],
    out: Path,
    kv_ratio: float | None,
    kv_max_kl: float | None,
    weight_ratio: float | None,
    weight_max_kl: float | None,
    sequences: int,
    per_head: bool,
) -> None:
    """Measure what lower precisions of parts of RECIPE's model cost, and choose.

    The plan is named in the recipe by the key `plan`. A part is measured where a ratio or a KL is
    given for it.
    """
    for option, ratio, max_kl in (
        ("kv", kv_ratio, kv_max_kl),
        ("weight", weight_ratio, weight_max_kl),
    ):
        if ratio is not None and max_kl is not None:
            raise click.UsageError(f"give --{option}-ratio or --{option}-max-kl, not both")
    has_kv = kv_ratio is not None or kv_max_kl is not None
    has_weights = weight_ratio is not None or weight_max_kl is not None
    if not has_kv and not has_weights:
        raise click.UsageError(
            "give what to aim at: --kv-ratio or --kv-max-kl, --weight-ratio or --weight-max-kl"
        )
    if per_head and not has_kv:
        raise click.UsageError("--per-head needs --kv-ratio or --kv-max-kl")

    # Here, not above: the list of commands must not need what only builds need.
    from llmbuild.builder.planning.mix import make_plan
    from llmbuild.builder.planning.part import Aim
    from llmbuild.builder.sources.progress import stderr_progress

    parts = make_plan(
        recipe_path,
        out,
        overrides,
        kv=Aim("kv", kv_ratio, kv_max_kl) if has_kv else None,
        weights=Aim("weight", weight_ratio, weight_max_kl) if has_weights else None,
        sequences=sequences,
        per_head=per_head,
        progress=stderr_progress(),
    )
    for part in parts:
        _show(part)
    click.echo(out)


def _show(part: "Part") -> None:
    """A table on a terminal, plain lines elsewhere, and the totals."""
    precisions = [*dict.fromkeys(o.precision for options in part.items.values() for o in options)]
    header = [part.name, *(f"KL {precision}" for precision in precisions[1:]), "chosen"]
    rows = []
    for match, options in part.items.items():
        kl_nats = {option.precision: f"{option.kl_nats:.2e}" for option in options}
        figures = [kl_nats.get(precision, "") for precision in precisions[1:]]
        rows.append([match, *figures, part.choice[match].precision])
    if sys.stdout.isatty():
        _show_table(header, rows)
    else:
        for line in _aligned([header, *rows]):
            click.echo(line)
    click.echo(
        f"{part.name}: {part.bytes_each:,.0f} bytes a {part.unit}, {part.ratio:.2%} of those in "
        f"{part.full_dtype}; KL {part.expected_kl_nats:.4g} nats a token expected, "
        f"{part.together_kl_nats:.4g} measured with all choices together"
    )


def _show_table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table()
    for index, name in enumerate(header):
        table.add_column(name, justify="right" if 0 < index < len(header) - 1 else "left")
    for row in rows:
        table.add_row(*row)
    Console().print(table)


def _aligned(rows: Sequence[Sequence[str]]) -> Iterable[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        yield "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
