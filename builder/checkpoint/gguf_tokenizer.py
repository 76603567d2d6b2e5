"""The tokenizer in a GGUF file's metadata -> a tokenizers.Tokenizer.

What the metadata means follows llama.cpp's llama-vocab.cpp. Two kinds are supported: "gpt2",
byte-level BPE with stored merges and a named pre-tokeniser, and "llama", SentencePiece BPE with
scores.
"""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers

from llmbuild.builder.checkpoint.base import TokenizerFiles
from llmbuild.builder.checkpoint.gguf_file import read_gguf
from llmbuild.builder.checkpoint.pretokenizers import PRETOKENIZERS
from llmbuild.builder.checkpoint.sentencepiece_model import SPACE, PieceType, merges_from_scores
from llmbuild.errors import CheckpointError

# Control tokens that end a generation, known by their text: files name only one EOS, while chat
# models end turns with another token. The list is the part of llama.cpp's for text models.
_END_TEXTS = (
    *("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<end_of_turn>", "<|end|>"),
    *("<|endoftext|>", "<|end_of_text|>"),
)


def read_gguf_tokenizer(path: Path) -> TokenizerFiles:
    """The tokenizer, its special ids and the chat template of a GGUF file.

    Raises CheckpointError for a damaged file, a tokenizer of another kind, and tables that
    contradict each other.
    """
    metadata = read_gguf(path).metadata
    try:
        return _convert(_Vocabulary(metadata), metadata)
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from error


def _convert(vocabulary: "_Vocabulary", metadata: Mapping[str, Any]) -> TokenizerFiles:
    if vocabulary.kind == "llama":
        tokenizer = _sentencepiece(vocabulary, metadata)
        bos, eos, add_bos = 1, 2, True
    else:
        tokenizer, add_bos = _byte_level(vocabulary, metadata)
        bos, eos = None, None
    _add_special_tokens(tokenizer, vocabulary)
    return TokenizerFiles(
        tokenizer_json=tokenizer.to_str(),
        bos_token_id=_special_id(vocabulary, metadata, "bos", bos),
        eos_token_ids=_eos_ids(vocabulary, metadata, eos),
        add_bos=_value(metadata, "tokenizer.ggml.add_bos_token", bool, add_bos),
        chat_template=_value(metadata, "tokenizer.chat_template", str, None),
    )


class _Vocabulary:
    """The token table, checked: unique texts, and one type for each."""

    def __init__(self, metadata: Mapping[str, Any]) -> None:
        self.kind = metadata.get("tokenizer.ggml.model")
        if self.kind not in ("gpt2", "llama"):
            raise CheckpointError(
                f"tokenizer.ggml.model is {self.kind!r}; supported are gpt2 (byte-level BPE) and "
                "llama (SentencePiece BPE)"
            )
        self.tokens = _list(metadata, "tokenizer.ggml.tokens", (str,))
        self.ids = {token: token_id for token_id, token in enumerate(self.tokens)}
        if len(self.ids) != len(self.tokens):
            repeated = {t for token_id, t in enumerate(self.tokens) if self.ids[t] != token_id}
            raise CheckpointError(
                f"tokenizer.ggml.tokens has tokens twice: {', '.join(map(repr, sorted(repeated)))}"
            )
        self.types = [PieceType.NORMAL] * len(self.tokens)
        if "tokenizer.ggml.token_type" in metadata:
            self.types = _list(metadata, "tokenizer.ggml.token_type", (int,), len(self.tokens))

    def of_type(self, kind: PieceType) -> list[str]:
        return [
            token for token, type_ in zip(self.tokens, self.types, strict=True) if type_ == kind
        ]


def _byte_level(vocabulary: _Vocabulary, metadata: Mapping[str, Any]) -> tuple[Tokenizer, bool]:
    """The tokenizer, and whether prompts start with BOS if the file doesn't say."""
    pre = metadata.get("tokenizer.ggml.pre")
    pretokenizer = PRETOKENIZERS.get(pre) if isinstance(pre, str) else None
    if pretokenizer is None:
        raise CheckpointError(
            f"tokenizer.ggml.pre is {pre!r}, so how text is split before BPE isn't known; "
            f"supported are {', '.join(PRETOKENIZERS)}"
        )
    merges = [_split_merge(merge) for merge in _list(metadata, "tokenizer.ggml.merges", (str,))]
    tokenizer = _bpe(vocabulary, merges, ignore_merges=pretokenizer.ignore_merges)
    if pretokenizer.normalizer is not None:
        tokenizer.normalizer = pretokenizer.normalizer
    tokenizer.pre_tokenizer = pretokenizer.split
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer, pretokenizer.add_bos


def _split_merge(merge: str) -> tuple[str, str]:
    left, space, right = merge.partition(" ")
    if not (left and space and right):
        raise CheckpointError(
            f"tokenizer.ggml.merges has {merge!r}, not two tokens with a space between them"
        )
    return left, right


def _sentencepiece(vocabulary: _Vocabulary, metadata: Mapping[str, Any]) -> Tokenizer:
    unknown_id = _special_id(vocabulary, metadata, "unknown", 0)
    assert unknown_id is not None
    scores = _list(metadata, "tokenizer.ggml.scores", (float, int), len(vocabulary.tokens))
    normal = [i for i, kind in enumerate(vocabulary.types) if kind == PieceType.NORMAL]
    tokenizer = _bpe(
        vocabulary,
        merges_from_scores({vocabulary.tokens[i]: scores[i] for i in normal}),
        unk_token=vocabulary.tokens[unknown_id],
        fuse_unk=True,
        byte_fallback=True,
    )
    adds_space = _value(metadata, "tokenizer.ggml.add_space_prefix", bool, True)
    prefix = [normalizers.Prepend(SPACE)] if adds_space else []
    tokenizer.normalizer = normalizers.Sequence([*prefix, normalizers.Replace(" ", SPACE)])
    strip = [decoders.Strip(content=" ", left=1, right=0)] if adds_space else []
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    return tokenizer


def _bpe(vocabulary: _Vocabulary, merges: list[tuple[str, str]], **options: Any) -> Tokenizer:
    try:
        return Tokenizer(models.BPE(vocab=vocabulary.ids, merges=merges, **options))
    except Exception as error:  # the library raises bare Exception
        raise CheckpointError(f"the tokenizer's merges don't fit its tokens: {error}") from error


def _add_special_tokens(tokenizer: Tokenizer, vocabulary: _Vocabulary) -> None:
    """Marks the tokens that are found in the text before anything else, at their own ids."""
    special = vocabulary.of_type(PieceType.CONTROL) + vocabulary.of_type(PieceType.UNKNOWN)
    tokenizer.add_special_tokens(_added(special, special=True))
    user_defined = vocabulary.of_type(PieceType.USER_DEFINED)
    tokenizer.add_tokens(_added(user_defined, special=False))


def _added(tokens: Iterable[str], *, special: bool) -> list[AddedToken]:
    return [AddedToken(token, special=special, normalized=False) for token in tokens]


def _eos_ids(
    vocabulary: _Vocabulary, metadata: Mapping[str, Any], default: int | None
) -> tuple[int, ...]:
    """Every id that ends a generation; the one that the file calls EOS first."""
    control = set(vocabulary.of_type(PieceType.CONTROL))
    found = [
        _special_id(vocabulary, metadata, "eos", default),
        _special_id(vocabulary, metadata, "eot", None),
        _special_id(vocabulary, metadata, "eom", None),
        *(vocabulary.ids[text] for text in _END_TEXTS if text in control),
    ]
    return tuple(dict.fromkeys(token_id for token_id in found if token_id is not None))


def _special_id(
    vocabulary: _Vocabulary, metadata: Mapping[str, Any], name: str, default: int | None
) -> int | None:
    key = f"tokenizer.ggml.{name}_token_id"
    token_id: int | None = _value(metadata, key, int, default)
    if token_id is not None and not 0 <= token_id < len(vocabulary.tokens):
        raise CheckpointError(
            f"{key} is {token_id}, but the vocabulary has {len(vocabulary.tokens)} tokens"
        )
    return token_id


def _value(metadata: Mapping[str, Any], key: str, kind: type, default: Any) -> Any:
    value = metadata.get(key, default)
    if value is not default and type(value) is not kind:
        raise CheckpointError(f"{key} is {value!r}, not of type {kind.__name__}")
    return value


def _list(
    metadata: Mapping[str, Any], key: str, kinds: tuple[type, ...], length: int | None = None
) -> list[Any]:
    value = metadata.get(key)
    if not isinstance(value, list) or not all(type(item) in kinds for item in value):
        raise CheckpointError(f"{key} is missing or isn't a list of {kinds[0].__name__}")
    if length is not None and len(value) != length:
        raise CheckpointError(f"{key} has {len(value)} entries for {length} tokens")
    return value
