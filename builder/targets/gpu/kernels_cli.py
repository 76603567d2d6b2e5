"""`llmbuild kernels`."""

import sys
from pathlib import Path

import click


def _numbers(ctx: click.Context, param: click.Parameter, value: str | None) -> list[int]:
    parts = value.split(",") if value is not None else []
    if not all(part.strip().isdecimal() for part in parts):
        raise click.BadParameter(f"{value!r} isn't numbers with commas between, such as 80,90")
    return list(dict.fromkeys(map(int, parts)))


@click.command("kernels")
@click.option(
    "--sm",
    "sms",
    callback=_numbers,
    metavar="80,90",
    help="Compute capabilities to compile for.  [default: all that are known]",
)
@click.option("--only", metavar="TEXT", help="Take only kernels whose name has TEXT in it.")
@click.option("--markdown", "as_markdown", is_flag=True, help="Print a Markdown table.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON list.")
@click.option(
    "--out",
    metavar="DIR",
    type=click.Path(path_type=Path, file_okay=False),
    help="Write PTX, cubins and an index of them into DIR, a new folder.",
)
def kernels_command(
    sms: list[int], only: str | None, as_markdown: bool, as_json: bool, out: Path | None
) -> None:
    """Compile the GPU kernels ahead of time and list what they use. Needs no GPU."""
    if as_markdown and as_json:
        raise click.UsageError("--markdown and --json are two forms of one list; give one of them")
    # Here, not above: the list of commands must not need what only builds need.
    import msgspec

    from llmbuild.builder.targets.gpu import kernel_table
    from llmbuild.builder.targets.gpu.capabilities import CAPABILITIES
    from llmbuild.builder.targets.gpu.kernel_folder import check_out, write_kernels
    from llmbuild.builder.targets.gpu.kernels import compile_kernels, registered_kernels, usable
    from llmbuild.errors import BuildError

    requests = registered_kernels(sms or CAPABILITIES)
    requests = [request for request in requests if (only or "") in request.variant.name]
    if not requests:
        raise BuildError(f"no kernel has {only!r} in its name; `llmbuild kernels` lists them")
    label = f"{len(requests)} kernels"
    if out is not None:
        check_out(out)
    with click.progressbar(length=len(requests), label=label, file=sys.stderr) as bar:
        outcomes = compile_kernels(requests, on_done=lambda _: bar.update(1))
    cached = sum(outcome.cached for outcome in outcomes)
    click.echo(f"{cached} of them from the cache", err=True)
    compiled = [(outcome.request, outcome.kernel) for outcome in outcomes if outcome.kernel]
    table = kernel_table.rows(compiled)
    if as_json:
        click.echo(msgspec.json.encode(table))
    else:
        text = kernel_table.markdown(table) if as_markdown else kernel_table.lines(table)
        click.echo("\n".join(text))
    kernels = usable(outcomes)
    if out is not None:
        write_kernels(kernels, out)
