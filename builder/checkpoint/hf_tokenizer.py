"""The tokenizer files of a Hugging Face directory."""

import json
from itertools import takewhile
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from llmbuild.builder.checkpoint.base import TokenizerFiles
from llmbuild.builder.checkpoint.files import read_json_object, read_text_file
from llmbuild.builder.checkpoint.sentencepiece_model import convert_sentencepiece
from llmbuild.errors import CheckpointError


def read_hf_tokenizer(directory: Path) -> TokenizerFiles:
    """The tokenizer, its special ids and the chat template of a directory.

    Ids: EOS from generation_config.json, else config.json, else the tokenizer's eos_token; BOS
    is what tokenizer.json itself starts texts with, else the tokenizer's bos_token, else as EOS.
    Raises CheckpointError for missing or malformed files, and for tokens that don't exist.
    """
    settings = _optional_json(directory / "tokenizer_config.json")
    generation = _optional_json(directory / "generation_config.json")
    config = _optional_json(directory / "config.json")
    tokenizer_json = _read_tokenizer_json(directory, settings, config)
    tokenizer = _load(directory, tokenizer_json)
    settings = _optional_json(directory / "special_tokens_map.json") | settings
    prepended = _prepended_id(directory, tokenizer)
    add_bos = settings.get("add_bos_token")
    if add_bos is None:
        add_bos = prepended is not None
    if not isinstance(add_bos, bool):
        raise CheckpointError(
            f"{directory / 'tokenizer_config.json'}: add_bos_token is {add_bos!r}, not a boolean"
        )
    bos_ids = (
        ([prepended] if prepended is not None else [])
        or _named_id(directory, tokenizer, settings, "bos_token")
        or _ids(directory, generation, "bos_token_id")
        or _ids(directory, config, "bos_token_id")
    )
    eos_ids = (
        _ids(directory, generation, "eos_token_id")
        or _ids(directory, config, "eos_token_id")
        or _named_id(directory, tokenizer, settings, "eos_token")
    )
    return TokenizerFiles(
        tokenizer_json=tokenizer_json,
        bos_token_id=bos_ids[0] if bos_ids else None,
        eos_token_ids=tuple(dict.fromkeys(eos_ids)),
        add_bos=add_bos,
        chat_template=_chat_template(directory, settings),
    )


def _read_tokenizer_json(directory: Path, settings: dict[str, Any], config: dict[str, Any]) -> str:
    """The file's text, or the text for a directory that has tokenizer.model instead; without
    truncation or padding, which would be applied to prompts."""
    path = directory / "tokenizer.json"
    if not path.exists():
        if (directory / "tokenizer.model").exists():
            return convert_sentencepiece(directory, settings, str(config.get("model_type")))
        raise CheckpointError(f"{path} is missing")
    content = read_json_object(path)
    if content.get("truncation") is None and content.get("padding") is None:
        return read_text_file(path).decode()
    return json.dumps(content | {"truncation": None, "padding": None}, ensure_ascii=False)


def _load(directory: Path, tokenizer_json: str) -> Tokenizer:
    try:
        return Tokenizer.from_str(tokenizer_json)
    except Exception as error:  # the library raises bare Exception
        raise CheckpointError(
            f"{directory / 'tokenizer.json'} isn't a tokenizer that the tokenizers library "
            f"loads: {error}"
        ) from error


def _optional_json(path: Path) -> dict[str, Any]:
    return read_json_object(path) if path.exists() else {}


def _prepended_id(directory: Path, tokenizer: Tokenizer) -> int | None:
    """The token that the tokenizer's own template puts before a text."""
    encoding = tokenizer.encode("a", add_special_tokens=True)
    marked = zip(encoding.ids, encoding.special_tokens_mask, strict=True)
    before = [token_id for token_id, _ in takewhile(lambda pair: pair[1] == 1, marked)]
    if len(before) > 1:
        raise CheckpointError(
            f"{directory / 'tokenizer.json'} starts texts with the tokens {before}; only one, "
            "BOS, is supported"
        )
    return before[0] if before else None


def _ids(directory: Path, values: dict[str, Any], key: str) -> list[int]:
    """The ids under `key`: an integer, a list of them, or null."""
    value = values.get(key)
    ids = [] if value is None else value if isinstance(value, list) else [value]
    if not all(type(item) is int and item >= 0 for item in ids):
        raise CheckpointError(f"{directory}: {key} is {value!r}; allowed are token ids, or null")
    return ids


def _named_id(
    directory: Path, tokenizer: Tokenizer, settings: dict[str, Any], key: str
) -> list[int]:
    """The id of the token whose text stands under `key`, as a list of at most one."""
    value = settings.get(key)
    text = value.get("content") if isinstance(value, dict) else value
    if text is None:
        return []
    token_id = tokenizer.token_to_id(text) if isinstance(text, str) else None
    if token_id is None:
        raise CheckpointError(
            f"{directory / 'tokenizer_config.json'}: {key} is {value!r}, which tokenizer.json "
            "doesn't have"
        )
    return [token_id]


def _chat_template(directory: Path, settings: dict[str, Any]) -> str | None:
    template_file = directory / "chat_template.jinja"
    if template_file.exists():
        try:
            return read_text_file(template_file).decode()
        except UnicodeDecodeError as error:
            raise CheckpointError(f"{template_file} can't be read: {error}") from error
    template = _optional_json(directory / "chat_template.json").get("chat_template")
    if template is None:
        template = settings.get("chat_template")
    if isinstance(template, list):
        return _default_template(directory, template)
    if template is not None and not isinstance(template, str):
        raise CheckpointError(f"{directory}: chat_template is {template!r}, not a text")
    return template


def _default_template(directory: Path, entries: list[Any]) -> str:
    named = {
        entry["name"]: entry["template"]
        for entry in entries
        if isinstance(entry, dict) and {"name", "template"} <= entry.keys()
    }
    if not isinstance(named.get("default"), str):
        raise CheckpointError(
            f"{directory}: chat_template is a list without one named 'default'; it has "
            f"{', '.join(map(str, named)) or 'none with a name'}"
        )
    return str(named["default"])
