"""The engine's tokenizer: text to token ids and back."""

import re
from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Annotated, NamedTuple

import msgspec
import tokenizers

from llmbuild.errors import EngineError, RequestError

TOKENIZER_NAME = "tokenizer.json"
GENERATION_CONFIG_NAME = "generation_config.json"

BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")  # a raw byte in SentencePiece vocabularies


TokenId = Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]


class GenerationConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The engine's generation_config.json."""

    bos_token_id: TokenId | None
    eos_token_id: list[TokenId]  # the first is the one that chat templates name
    add_bos: bool


class Piece(NamedTuple):
    """What a token is to its text. is_silent: decoding skips it, as it is special or not in the
    vocabulary. is_byte: it stands for one raw byte, whose text depends on the bytes around it.
    text: its own where it stands alone."""

    is_silent: bool
    is_byte: bool
    text: str


class Pieces(dict[int, Piece]):
    """The piece of each token id, found out when it is first asked for."""

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        self._backend = backend
        self._special_ids = frozenset(
            token_id
            for token_id, token in backend.get_added_tokens_decoder().items()
            if token.special
        )

    def __missing__(self, token_id: int) -> Piece:
        token: str | None = self._backend.id_to_token(token_id)
        is_silent = token is None or token_id in self._special_ids
        is_byte = token is not None and BYTE_TOKEN.fullmatch(token) is not None
        text: str = self._backend.decode([token_id], skip_special_tokens=True)
        piece = self[token_id] = Piece(is_silent, is_byte, text)
        return piece


class _Merges(msgspec.Struct):
    merges: msgspec.Raw


class _BpeFile(msgspec.Struct):
    model: _Merges


class Tokenizer:
    """A tokenizers.Tokenizer with the model's BOS and EOS rules."""

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        config: GenerationConfig,
        load_encoder: Callable[[], tokenizers.Tokenizer] | None = None,
    ) -> None:
        """backend: the tokenizer; or, with load_encoder, one that can only decode. load_encoder is
        called then when the first text comes."""
        self._backend = backend
        self._load_encoder = load_encoder
        self._bos_id = config.bos_token_id
        self._add_bos = config.add_bos and config.bos_token_id is not None
        self.eos_ids = frozenset(config.eos_token_id)
        self.bos_token = self._token(config.bos_token_id)
        self.eos_token = self._token(config.eos_token_id[0] if config.eos_token_id else None)
        self.pieces = Pieces(backend)

    def encode(self, text: str, *, with_bos: bool = True) -> list[int]:
        """Token ids of text; special tokens spelled out in it are taken as such.

        BOS comes first, once, if the model wants one and `with_bos` is true. Raises
        RequestError for text that isn't valid Unicode.
        """
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise RequestError(
                f"the text has a lone surrogate, {text[error.start]!r}, at character "
                f"{error.start}; give valid Unicode text"
            ) from None
        ids: list[int] = self._encoder.encode(text, add_special_tokens=False).ids
        if with_bos and self._add_bos and ids[:1] != [self._bos_id]:
            assert self._bos_id is not None
            return [self._bos_id, *ids]
        return ids

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of token ids, special tokens left out."""
        text: str = self._backend.decode(token_ids, skip_special_tokens=True)
        return text

    @cached_property
    def _encoder(self) -> tokenizers.Tokenizer:
        encoder = self._backend if self._load_encoder is None else self._load_encoder()
        encoder.no_truncation()
        encoder.no_padding()
        return encoder

    def _token(self, token_id: int | None) -> str | None:
        token: str | None = None if token_id is None else self._backend.id_to_token(token_id)
        return token


def load_tokenizer(root: Path) -> Tokenizer:
    """The tokenizer of the engine directory `root`; raises EngineError."""
    config_path = root / GENERATION_CONFIG_NAME
    try:
        config = msgspec.json.decode(config_path.read_bytes(), type=GenerationConfig)
    except (OSError, msgspec.MsgspecError) as error:
        raise EngineError(f"{config_path} can't be read: {error}; build the engine again") from None
    path = root / TOKENIZER_NAME
    try:
        file = path.read_bytes()
    except OSError as error:
        raise EngineError(f"{path} can't be read: {error}; build the engine again") from None
    without_merges = _without_merges(file)
    if without_merges is None:
        return Tokenizer(_parse(file, path), config)
    return Tokenizer(_parse(without_merges, path), config, lambda: _parse(file, path))


def _parse(file: bytes, path: Path) -> tokenizers.Tokenizer:
    try:
        return tokenizers.Tokenizer.from_buffer(file)
    except Exception as error:  # the library raises Exception itself
        raise EngineError(f"{path} can't be read: {error}; build the engine again") from None


def _without_merges(file: bytes) -> bytes | None:
    """A tokenizer.json that decodes as `file` does, and is parsed in less than half the time;
    None where it isn't one of a BPE model. Only encoding asks which pieces merge."""
    try:
        merges = bytes(msgspec.json.decode(file, type=_BpeFile).model.merges)
    except msgspec.MsgspecError:
        return None
    start = file.find(merges[:64])  # to search for all of it would take longer than it saves
    end = start + len(merges)
    return file[:start] + b"[]" + file[end:] if file[start:end] == merges else None
