"""Turns pydantic's findings about a recipe into one line each, in the recipe's own terms."""

import difflib
import json
from collections.abc import Iterator, Mapping
from types import UnionType
from typing import Any, get_args

import yaml
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails, PydanticCustomError

# Known, and refused until they are built.
UNSUPPORTED_VALUES: dict[str, set[object]] = {
    "precision": {"int8", "int4", "fp8"},
}

MAX_SHOWN_CHARACTERS = 80
_OF_ITEMS = {"extra_forbidden", "invalid_key", "missing"}  # in a list, whose keys have no paths


def problem(text: str, loc: tuple[str, ...] | None = None) -> PydanticCustomError:
    """What a recipe's validators raise.

    `text` follows the value given; `loc` is the key path where it isn't the validated field's.
    """
    return PydanticCustomError("problem", "{text}", {"text": text, "loc": loc})


def problem_lines(error: ValidationError, schema: type[BaseModel], content: Any) -> list[str]:
    """One line for each problem: key path, what was given, what is allowed.

    schema: the recipe's model, whose field descriptions say what is allowed. content: the
    mapping that was validated.
    """
    problems: dict[tuple[tuple[int | str, ...], str], ErrorDetails] = {}
    for details in error.errors(include_url=False):
        keys, _ = _locate(_location(details), content)
        # Several bad items of one list are one problem.
        problems.setdefault((tuple(keys), details["type"]), details)
    lines = [_line(details, schema, content) for details in problems.values()]
    return list(dict.fromkeys(lines))


def _location(details: ErrorDetails) -> tuple[int | str, ...]:
    location: tuple[int | str, ...] = details.get("ctx", {}).get("loc") or details["loc"]
    return location


def _line(details: ErrorDetails, schema: type[BaseModel], content: Any) -> str:
    keys, given = _locate(_location(details), content)
    path = ".".join(map(_key_text, keys))
    if len(keys) < len(_location(details)) and details["type"] in _OF_ITEMS:
        return f"{path}: given {_shown(given)}; allowed: {_allowed(keys, schema)}"
    match details["type"]:
        case "extra_forbidden" | "invalid_key":
            return f"{path}: {_unknown_key(path, str(keys[-1]), schema)}"
        case "missing":
            return f"{path}: missing; give {_allowed(keys, schema)}"
        case "problem":
            return f"{path}: given {_shown(given)}; {details['ctx']['text']}"
    allowed = f"allowed: {_allowed(keys, schema)}"
    if _is_unsupported(".".join(map(str, details["loc"])), details["input"]):
        return f"{path}: given {_shown(given)}, which is not yet supported; {allowed}"
    return f"{path}: given {_shown(given)}; {allowed}"


def _locate(loc: tuple[int | str, ...], content: Any) -> tuple[list[int | str], Any]:
    """The keys as the user wrote them and the value there: a list, or a word, is one value."""
    keys: list[int | str] = []
    value = content
    for key in loc:
        if not isinstance(value, Mapping):
            break
        keys.append(key)
        value = value.get(key)
    return keys, value


def _unknown_key(path: str, name: str, schema: type[BaseModel]) -> str:
    def likeness(known: str) -> tuple[float, float]:
        own_name = known.rpartition(".")[2]
        return _ratio(name, own_name), _ratio(path, known)

    nearest = max(known_keys(schema), key=likeness)
    return f"unknown key; the nearest known key is {nearest}"


def known_keys(schema: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """Every key of a recipe as a dotted path, sections before what they hold."""
    for name, field in schema.model_fields.items():
        yield prefix + name
        section = _section(field.annotation)
        if section is not None:
            yield from known_keys(section, f"{prefix}{name}.")


def _section(annotation: Any) -> type[BaseModel] | None:
    """The record that a field holds, one that may be left out included."""
    kinds = get_args(annotation) if isinstance(annotation, UnionType) else (annotation,)
    records = [kind for kind in kinds if isinstance(kind, type) and issubclass(kind, BaseModel)]
    return records[0] if records else None


def _allowed(keys: list[int | str], schema: type[BaseModel]) -> str:
    """The description of the field at `keys`; a section's is the list of its keys."""
    description: str | None = None
    section: Any = schema
    for key in keys:
        field = section.model_fields[key]
        section, description = _section(field.annotation), field.description
    return description or f"a mapping with the keys {', '.join(section.model_fields)}"


def _is_unsupported(path: str, value: object) -> bool:
    return isinstance(value, str) and value in UNSUPPORTED_VALUES.get(path, ())


def _ratio(a: str, b: str) -> float:
    return difflib.SequenceMatcher(a=a, b=b).ratio()


def _key_text(key: object) -> str:
    """A key as in a path; one that could be mistaken for a path is quoted."""
    text = str(key)
    return text if text.replace("_", "").isalnum() else json.dumps(text)


def _shown(value: object) -> str:
    """A value as YAML on one line, so that '32' and 32 differ."""
    try:
        text = yaml.safe_dump([value], default_flow_style=True, width=2**31, allow_unicode=True)
    except ValueError:  # Python writes no integer of more than some thousand digits
        return "a number of too many digits"
    line = " ".join(text.split())[1:-1]
    if len(line) > MAX_SHOWN_CHARACTERS:
        return line[:MAX_SHOWN_CHARACTERS] + "..."
    return line
