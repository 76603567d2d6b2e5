"""What a benchmark prints and writes: aligned tables, JSON files, messages."""

import sys
from collections.abc import Sequence
from pathlib import Path

import click
import msgspec

from llmbuild.errors import UserError


def table(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Rows of text under headers. A column whose every cell is a number, or "-", stands right."""
    widths = [max(map(len, column)) for column in zip(headers, *rows, strict=True)]
    numeric = [all(map(_is_number, column)) for column in zip(*rows, strict=True)]

    def line(cells: Sequence[str]) -> str:
        padded = [
            cell.rjust(width) if right else cell.ljust(width)
            for cell, width, right in zip(cells, widths, numeric, strict=True)
        ]
        return "  ".join(padded).rstrip()

    return "\n".join(line(cells) for cells in (headers, ["-" * width for width in widths], *rows))


def figure(value: float | None) -> str:
    """A measured number in three digits, or "-" for none."""
    if value is None:
        return "-"
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def percent(fraction: float) -> str:
    return f"{fraction * 100:.0f}%"


def write_json(path: Path, record: object) -> None:
    path.write_bytes(msgspec.json.format(msgspec.json.encode(record), indent=2) + b"\n")


def check_output(path: Path | None) -> None:
    """Refuses, before anything is measured, a file that can't be written."""
    if path is not None and not path.absolute().parent.is_dir():
        raise UserError(f"can't write {path}: the folder {path.absolute().parent} doesn't exist")


def run(command: click.Command) -> None:
    """Runs a command; what the user can mend is one message and exit code 2."""
    try:
        command()
    except UserError as error:
        click.echo(f"Error: {error}", err=True)
        sys.exit(2)


def _is_number(cell: str) -> bool:
    return cell == "-" or cell.rstrip("%").replace(".", "").replace("e+", "").isdigit()
