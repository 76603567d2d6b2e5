"""`llmbuild models`."""

import click


@click.command("models")
@click.option("--markdown", "as_markdown", is_flag=True, help="Print a Markdown table.")
def models_command(as_markdown: bool) -> None:
    """List the model families: features, formats, targets."""
    # Here, not above: the list of commands must not need what only builds need.
    from llmbuild.builder.models.table import markdown, rows

    if as_markdown:
        click.echo(markdown(), nl=False)
        return
    for name, covers, features, formats, targets in rows():
        click.echo(name)
        click.echo(f"  models    {covers}\n  features  {features}")
        click.echo(f"  formats   {formats}\n  targets   {targets}")
