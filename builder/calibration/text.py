"""Calibration tokens from a file: plain text, or JSON lines of texts and chats."""

from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray

from llmbuild.builder.recipe.calibration import ResolvedCalibration
from llmbuild.errors import BuildError, RequestError
from llmbuild.runtime.chat import ChatTemplate
from llmbuild.runtime.tokenizer import Tokenizer


class _Message(msgspec.Struct, forbid_unknown_fields=True):
    role: str
    content: str


class _Line(msgspec.Struct, forbid_unknown_fields=True):
    """A line of a .jsonl file: a text, or the messages of a chat."""

    text: str | None = None
    messages: list[_Message] | None = None


def tokens_of_file(
    path: Path,
    tokenizer: Tokenizer,
    template: ChatTemplate,
    chosen: ResolvedCalibration,
    asked: str,
) -> NDArray[np.int32]:
    """Tokens [chosen.sequences, chosen.length]: pieces of the file, spread over it by the seed.
    asked: the recipe's key that says how many.

    A .jsonl file's lines are {"text": ...} or {"messages": [{"role": ..., "content": ...}, ...]};
    any other file is text. Raises BuildError for a file that can't be used or is too short.
    """
    texts, sequences, length = _texts(path, template), chosen.sequences, chosen.length
    ids = np.concatenate(
        [np.array(tokenizer.encode(text), np.int32) for text in texts] or [np.empty(0, np.int32)]
    )
    available = len(ids) // length
    if available < sequences:
        raise BuildError(
            f"calibration.data: {path} has {len(ids)} tokens, enough for {available} sequences of "
            f"{length}, and {asked} is {sequences}: give a longer file, or fewer or shorter "
            "sequences"
        )
    taken = np.random.default_rng(chosen.seed).choice(available, sequences, replace=False)
    pieces = ids[: available * length].reshape(available, length)
    return np.ascontiguousarray(pieces[np.sort(taken)])


def _texts(path: Path, template: ChatTemplate) -> list[str]:
    try:
        content = path.read_bytes().decode("utf-8-sig")
    except OSError as error:
        raise BuildError(f"calibration.data: {path} can't be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise BuildError(
            f"calibration.data: {path} isn't UTF-8 text: byte {error.start} is wrong"
        ) from None
    except ValueError as error:
        raise BuildError(f"calibration.data: no file is named {str(path)!r}: {error}") from None
    if path.suffix != ".jsonl":
        return [content]
    lines = enumerate(content.split("\n"), start=1)
    return [_text(path, number, line, template) for number, line in lines if line.strip()]


def _text(path: Path, number: int, line: str, template: ChatTemplate) -> str:
    where = f"calibration.data: {path}, line {number}"
    try:
        entry = msgspec.json.decode(line, type=_Line)
    except msgspec.MsgspecError as error:
        raise BuildError(
            f'{where}: {error}; a line is {{"text": ...}} or {{"messages": [{{"role": ..., '
            f'"content": ...}}, ...]}}'
        ) from None
    if (entry.text is None) == (entry.messages is None):
        raise BuildError(f"{where}: give either text or messages")
    if entry.messages is None:
        assert entry.text is not None
        return entry.text
    messages = [{"role": message.role, "content": message.content} for message in entry.messages]
    try:
        return template.render(messages, add_generation_prompt=False)
    except RequestError as error:
        raise BuildError(f"{where}: {error}") from None
