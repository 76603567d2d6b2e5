"""docs/python.md names what the API has, and nothing else."""

import inspect
import re
from dataclasses import fields
from pathlib import Path

from llmbuild import LLM, Completion, SamplingParams, compile


def rows(page: str, heading: str) -> list[str]:
    """The first column of the table with this heading."""
    table = page.split(f"| {heading} |", 1)[1].split("\n\n", 1)[0]
    return re.findall(r"^\| `(\w+)", table, re.MULTILINE)


def test_every_argument_and_field_has_its_row(checkout: Path) -> None:
    page = (checkout / "docs" / "python.md").read_text()
    arguments = [name for name in inspect.signature(LLM).parameters if name != "self"]
    assert rows(page, "argument of `LLM`") == arguments
    assert rows(page, "field of `SamplingParams`") == [each.name for each in fields(SamplingParams)]
    for each in fields(Completion):
        assert f"`{each.name}`" in page
    for name in rows(page, "method"):
        assert callable(getattr(LLM, name))
    for name in inspect.signature(compile).parameters:
        assert name in page.split("## Building", 1)[1]


def test_defaults_are_those_of_the_api(checkout: Path) -> None:
    page = (checkout / "docs" / "python.md").read_text()
    for each in fields(SamplingParams):
        shown = "a new one" if each.default is None else str(each.default)
        assert re.search(rf"^\| `{each.name}` \| `?{re.escape(shown)}`? \|", page, re.MULTILINE)
