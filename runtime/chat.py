"""Chat messages to prompt text, through the model's own template."""

import json
import re
from collections.abc import Sequence
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from llmbuild.errors import EngineError, RequestError
from llmbuild.runtime.tokenizer import Tokenizer

if TYPE_CHECKING:
    from jinja2 import Template

CHAT_TEMPLATE_NAME = "chat_template.jinja"

Message = dict[str, Any]
Tool = dict[str, Any]
Document = dict[str, Any]

# transformers' tags around what the model itself says, for training: here they do nothing.
_GENERATION_TAGS = {
    re.compile(r"(\{%[-+]?\s*)generation(\s*[-+]?%\})"): r"\1if true\2",
    re.compile(r"(\{%[-+]?\s*)endgeneration(\s*[-+]?%\})"): r"\1endif\2",
}


class ChatTemplate:
    """Renders messages as transformers does; jinja2 is imported when it is first used."""

    def __init__(self, source: str | None, tokenizer: Tokenizer) -> None:
        """source: the template's text; None if the model has no template."""
        self._source = source
        # A token the model doesn't have is left undefined, which templates print as nothing.
        tokens = {"bos_token": tokenizer.bos_token, "eos_token": tokenizer.eos_token}
        self._tokens = {name: token for name, token in tokens.items() if token is not None}

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Tool] | None = None,
        documents: Sequence[Document] | None = None,
        add_generation_prompt: bool = True,
    ) -> str:
        """The prompt text of a conversation; raises RequestError.

        messages: dicts with a "role" and what the template wants beside it, mostly "content".
        tools: JSON schemas of functions that the model may call; documents: what it may cite. A
        template that knows neither leaves them out.
        """
        _check_messages(messages)
        _check_dicts("tools", tools, '{"type": "function", "function": {"name": "...", ...}}')
        _check_dicts("documents", documents, '{"title": "...", "text": "..."}')
        try:
            return self._template.render(
                messages=messages,
                tools=tools,
                documents=documents,
                add_generation_prompt=add_generation_prompt,
                **self._tokens,
            )
        except RequestError:
            raise
        except Exception as error:  # templates are programs and fail in many ways
            raise RequestError(f"the chat template refuses these messages: {error}") from None

    @cached_property
    def _template(self) -> "Template":
        if self._source is None:
            raise RequestError(
                "the model has no chat template; give the prompt as text or token ids instead"
            )
        import jinja2
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        source = self._source
        for tag, replacement in _GENERATION_TAGS.items():
            source = tag.sub(replacement, source)
        try:
            return environment.from_string(source)
        except jinja2.TemplateError as error:
            raise RequestError(f"the model's chat template can't be compiled: {error}") from None


def load_chat_template(root: Path, tokenizer: Tokenizer) -> ChatTemplate:
    """The chat template of the engine directory `root`, which may have none. Raises EngineError
    for one that can't be read."""
    path = root / CHAT_TEMPLATE_NAME
    try:
        source = path.read_text(encoding="utf-8") if path.exists() else None
    except (OSError, UnicodeDecodeError) as error:
        raise EngineError(f"{path} can't be read: {error}; build the engine again") from None
    return ChatTemplate(source, tokenizer)


def _check_messages(messages: Sequence[Message]) -> None:
    if not isinstance(messages, list | tuple) or not messages:
        raise RequestError(
            f"messages must be a list of at least one message, got {messages!r:.80}; "
            'a message is {"role": "user", "content": "..."}'
        )
    for index, message in enumerate(messages):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise RequestError(
                f"message {index} is {message!r:.80}; each must be a dict with a text under "
                '"role", as {"role": "user", "content": "..."}'
            )


def _check_dicts(name: str, values: object, example: str) -> None:
    if values is None:
        return
    if not isinstance(values, list | tuple) or not all(isinstance(item, dict) for item in values):
        raise RequestError(f"{name} must be a list of dicts such as {example}, got {values!r:.80}")


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own filter escapes for HTML, which prompts don't want."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _raise_exception(message: str) -> NoReturn:
    raise RequestError(f"the chat template refuses these messages: {message}")


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)
