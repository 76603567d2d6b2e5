"""Reads recipe text and `--set` overrides into plain mappings, strictly."""

import re
from collections.abc import Hashable, Sequence
from pathlib import Path
from typing import Any

import yaml

from llmbuild.errors import RecipeError

MAX_RECIPE_BYTES = 1 << 20
_WORD_KEYS = {"target": "kind", "quantisation": "scheme"}  # what a section of one word stands for


class _Loader(yaml.SafeLoader):
    """The safe loader, refusing duplicate keys and reading 1e-4 as the number it is."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: set[tuple[str, str]] = set()
        pairs = node.value if isinstance(node, yaml.MappingNode) else []  # a text tagged !!map
        for key, _ in pairs:
            if isinstance(key, yaml.ScalarNode):
                if (key.tag, key.value) in seen:
                    raise yaml.constructor.ConstructorError(
                        problem=f"the key {key.value} is given twice", problem_mark=key.start_mark
                    )
                seen.add((key.tag, key.value))
        return super().construct_mapping(node, deep)

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        try:
            return super().construct_object(node, deep)
        except (ValueError, ArithmeticError, LookupError, AttributeError) as error:
            # such as the date 2026-13-45
            raise yaml.constructor.ConstructorError(
                problem=f"{node.value!r} isn't a valid {node.tag.rpartition(':')[2]}",
                problem_mark=node.start_mark,
            ) from error


class RecipeDumper(yaml.SafeDumper):
    """The safe dumper, with lists on one line."""

    def list_on_one_line(self, values: list[Any]) -> yaml.Node:
        return self.represent_sequence("tag:yaml.org,2002:seq", values, flow_style=True)


RecipeDumper.add_representer(list, RecipeDumper.list_on_one_line)

# YAML 1.1, which the library reads, wants a dot in 1.0e-4; YAML 1.2 doesn't.
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"[-+]?[0-9]+(\.[0-9]*)?[eE][-+]?[0-9]+$"),
    list("-+0123456789"),
)


def read_recipe(path: Path, kind: str = "recipe") -> dict[Any, Any]:
    """The mapping that a recipe file holds, its keys and values not yet checked.

    kind: what messages call the file.
    """
    what = f"{kind} {path}"
    try:
        if path.is_dir() or (path.exists() and not path.is_file()):
            raise RecipeError(f"{what}: it isn't a file; give the path of a YAML file")
        with path.open("rb") as file:
            raw = file.read(MAX_RECIPE_BYTES + 1)
        text = raw.decode()
    except OSError as error:
        raise RecipeError(f"{what}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise RecipeError(f"{what}: it isn't UTF-8 text (byte {error.start})") from error
    except ValueError as error:
        raise RecipeError(f"{kind} {str(path)!r}: no file has such a name: {error}") from error
    if len(raw) > MAX_RECIPE_BYTES:
        raise RecipeError(f"{what}: larger than {MAX_RECIPE_BYTES} bytes, so no {kind}")
    content = _parse(text, what)
    if content is None:
        raise RecipeError(f"{what}: it is empty; a {kind} starts with `version: 1`")
    if not isinstance(content, dict):
        raise RecipeError(
            f"{what}: it holds a {type(content).__name__}; "
            f"a {kind} is a mapping that starts with `version: 1`"
        )
    return content


def apply_overrides(content: dict[Any, Any], overrides: Sequence[str]) -> None:
    """Set each KEY.PATH=VALUE, its value read as YAML; sections that aren't there are made.

    A section of a single word, `target: cpu`, becomes {kind: cpu} when a key below it is set, and
    `quantisation: w4a8` {scheme: w4a8}.
    Whether the keys exist is for the recipe's own check. Raises RecipeError for one that would
    take back what an earlier one has set below it.
    """
    given: dict[str, str] = {}  # by key path
    for override in overrides:
        key_path, equals, text = override.partition("=")
        keys = key_path.strip().split(".")
        if not equals or not all(keys):
            raise RecipeError(f"--set {override}: not of the form KEY.PATH=VALUE")
        value = _parse(text, f"--set {override}")
        path = ".".join(keys)
        for below, earlier in given.items():
            if below.startswith(f"{path}."):
                raise RecipeError(
                    f"--set {override}: it replaces all of {path}, what --set {earlier} gave "
                    "among it; give it first, or leave the other out"
                )
        given[path] = override
        section = content
        for key in keys[:-1]:
            inner = section.get(key)
            if not isinstance(inner, dict):
                word_key = _WORD_KEYS.get(key)
                inner = {word_key: inner} if word_key and isinstance(inner, str) else {}
                section[key] = inner
            section = inner
        section[keys[-1]] = value


def _parse(text: str, where: str) -> Any:
    try:
        return yaml.load(text, _Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        at = f", line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        raise RecipeError(f"{where}{at}: bad YAML: {error.problem or error.context}") from error
    except yaml.YAMLError as error:
        reason = str(error).partition("\n")[0]
        raise RecipeError(f"{where}: bad YAML: {reason}") from error
    except RecursionError as error:
        raise RecipeError(f"{where}: bad YAML: nested too deeply") from error
