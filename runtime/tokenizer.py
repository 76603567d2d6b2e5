"""The engine's tokenizer: text to token ids and back."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

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


class Tokenizer:
    """A tokenizers.Tokenizer with the model's BOS and EOS rules."""

    def __init__(self, backend: tokenizers.Tokenizer, config: GenerationConfig) -> None:
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self._bos_id = config.bos_token_id
        self._add_bos = config.add_bos and config.bos_token_id is not None
        self.eos_ids = frozenset(config.eos_token_id)
        self.bos_token = self._token(config.bos_token_id)
        self.eos_token = self._token(config.eos_token_id[0] if config.eos_token_id else None)
        self._special_ids = frozenset(
            token_id
            for token_id, token in backend.get_added_tokens_decoder().items()
            if token.special
        )

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
        ids: list[int] = self._backend.encode(text, add_special_tokens=False).ids
        if with_bos and self._add_bos and ids[:1] != [self._bos_id]:
            assert self._bos_id is not None
            return [self._bos_id, *ids]
        return ids

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of token ids, special tokens left out."""
        text: str = self._backend.decode(list(token_ids), skip_special_tokens=True)
        return text

    def is_silent(self, token_id: int) -> bool:
        """Decoding skips this id: it is special, or the vocabulary doesn't have it."""
        return token_id in self._special_ids or self._backend.id_to_token(token_id) is None

    def is_byte(self, token_id: int) -> bool:
        """This id stands for one raw byte, whose text depends on the bytes around it."""
        token = self._backend.id_to_token(token_id)
        return token is not None and BYTE_TOKEN.fullmatch(token) is not None

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
        backend = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises Exception itself
        raise EngineError(f"{path} can't be read: {error}; build the engine again") from None
    return Tokenizer(backend, config)
