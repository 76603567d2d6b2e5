"""A SentencePiece `tokenizer.model` -> a tokenizers.Tokenizer.

The result gives what transformers' AutoTokenizer gives for the same directory, which is what
SentencePiece itself gives but for one case, see `_prefixes`.
"""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from enum import IntEnum
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from llmbuild.builder.checkpoint.files import read_json_object, read_text_file
from llmbuild.errors import CheckpointError

SPACE = "\u2581"  # SentencePiece's visible space

_UNIGRAM, _BPE = 1, 2  # trainer_spec.model_type
_SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token")


class PieceType(IntEnum):
    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


def convert_sentencepiece(directory: Path, settings: Mapping[str, Any], model_type: str) -> str:
    """tokenizer.json's text for the tokenizer.model in `directory`.

    settings: tokenizer_config.json; model_type: config.json's. Added tokens come from settings,
    added_tokens.json and special_tokens_map.json. Raises CheckpointError for a file that isn't a
    SentencePiece model, for kinds other than BPE and Unigram, and for added tokens whose ids
    can't be had.
    """
    path = directory / "tokenizer.model"
    proto = _parse(path)
    added = _added_tokens(directory, settings)
    names = {token_id: token.content for token_id, token in added if token_id is not None}
    pieces = [names.get(token_id, piece.piece) for token_id, piece in enumerate(proto.pieces)]
    try:
        tokenizer = Tokenizer(_model(path, proto, pieces))
    except Exception as error:  # the library raises bare Exception
        raise CheckpointError(f"{path}: its pieces make no tokenizer: {error}") from error
    legacy, is_doubled = _prefixes(settings, model_type)
    tokenizer.normalizer = _normalizer(proto, is_doubled=legacy and is_doubled)
    splits = _splits(proto, pieces, scheme="always" if legacy else "first")
    if splits:
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(splits)
    tokenizer.decoder = _decoder(proto)
    _add_tokens(path, tokenizer, proto, pieces, added)
    return str(tokenizer.to_str())


def merges_from_scores(scores: Mapping[str, float]) -> list[tuple[str, str]]:
    """SentencePiece joins the neighbours whose union has the best score. As a merge list: every
    way to cut a piece into two pieces, pieces by descending score. (Of two cuts of one piece
    SentencePiece takes the leftmost in the text, which no list can say; here the cut with the
    shorter left part stands first, as in transformers.)"""
    return [
        (piece[:cut], piece[cut:])
        for piece in sorted(scores, key=lambda piece: -scores[piece])
        for cut in range(1, len(piece))
        if piece[:cut] in scores and piece[cut:] in scores
    ]


def _parse(path: Path) -> Any:
    try:
        from sentencepiece import sentencepiece_model_pb2
    except ImportError as error:
        raise CheckpointError(
            f"{path} is read with the sentencepiece package, which can't be imported ({error}); "
            "`pip install '.[build]'` in llmbuild's checkout has it"
        ) from error
    messages: Any = sentencepiece_model_pb2  # whose classes are made when it is imported
    proto = messages.ModelProto()
    content = read_text_file(path)
    try:
        proto.ParseFromString(content)
    except Exception as error:  # protobuf's own, or what its C code raises
        raise CheckpointError(f"{path} isn't a SentencePiece model: {error}") from error
    if not proto.pieces:
        raise CheckpointError(f"{path} isn't a SentencePiece model: it has no pieces")
    if (
        proto.trainer_spec.treat_whitespace_as_suffix
        or not proto.normalizer_spec.escape_whitespaces
    ):
        raise CheckpointError(
            f"{path} has treat_whitespace_as_suffix or lacks escape_whitespaces; neither is "
            "supported, so give the tokenizer as tokenizer.json"
        )
    return proto


def _prefixes(settings: Mapping[str, Any], model_type: str) -> tuple[bool, bool]:
    """Whether each text between special tokens starts with a space of its own ("legacy"), or the
    first one alone; and whether a text that starts with a space gets a second one.

    SentencePiece says yes to both. For directories whose tokenizer is declared a LlamaTokenizer
    of a Llama, transformers says no unless told so, and no.
    """
    declared = str(settings.get("tokenizer_class")).removesuffix("Fast")
    is_llama = declared == "LlamaTokenizer" and model_type == "llama"
    return bool(settings.get("legacy", not is_llama)), not is_llama


def _model(path: Path, proto: Any, pieces: Sequence[str]) -> Any:
    spec = proto.trainer_spec
    if spec.model_type == _UNIGRAM:
        scored = [(piece, stored.score) for piece, stored in zip(pieces, proto.pieces, strict=True)]
        return models.Unigram(scored, unk_id=spec.unk_id, byte_fallback=spec.byte_fallback)
    if spec.model_type != _BPE:
        raise CheckpointError(
            f"{path} is a SentencePiece model of type {spec.model_type}; supported are unigram (1) "
            "and BPE (2)"
        )
    normal = {
        piece: stored.score
        for piece, stored in zip(pieces, proto.pieces, strict=True)
        if stored.type == PieceType.NORMAL
    }
    return models.BPE(
        {piece: token_id for token_id, piece in enumerate(pieces)},
        merges_from_scores(normal),
        unk_token=pieces[spec.unk_id],
        fuse_unk=True,
        byte_fallback=spec.byte_fallback,
        ignore_merges=bool(_user_defined(proto, pieces)),  # which no merges lead to
    )


def _normalizer(proto: Any, *, is_doubled: bool) -> Any:
    spec = proto.normalizer_spec
    steps: list[Any] = []
    if spec.precompiled_charsmap:
        steps.append(normalizers.Precompiled(spec.precompiled_charsmap))
    if spec.remove_extra_whitespaces:
        steps.append(normalizers.Replace(Regex(r"\A +| +\z"), ""))
        steps.append(normalizers.Replace(Regex(" {2,}"), " "))
    steps.append(normalizers.Replace(" ", SPACE))
    if spec.add_dummy_prefix and is_doubled:
        # Metaspace adds no prefix where the text starts with one.
        steps.append(normalizers.Replace(Regex(rf"\A{SPACE}"), SPACE * 2))
    return normalizers.Sequence(steps)


def _splits(proto: Any, pieces: Sequence[str], scheme: str) -> list[Any]:
    splits: list[Any] = []
    if proto.normalizer_spec.add_dummy_prefix:
        splits.append(
            pre_tokenizers.Metaspace(replacement=SPACE, prepend_scheme=scheme, split=False)
        )
    user_defined = sorted(_user_defined(proto, pieces), key=len, reverse=True)
    if user_defined:
        pattern = "|".join(map(re.escape, user_defined))
        splits.append(pre_tokenizers.Split(Regex(pattern), "isolated"))
    return splits


def _user_defined(proto: Any, pieces: Sequence[str]) -> list[str]:
    """Pieces that are taken whole wherever they stand, after the prefix has been added."""
    return [
        piece
        for piece, stored in zip(pieces, proto.pieces, strict=True)
        if stored.type == PieceType.USER_DEFINED
    ]


def _decoder(proto: Any) -> Any:
    steps: list[Any] = [decoders.Replace(SPACE, " ")]
    if proto.trainer_spec.byte_fallback:
        steps.append(decoders.ByteFallback())
    steps.append(decoders.Fuse())
    if proto.normalizer_spec.add_dummy_prefix:
        steps.append(decoders.Strip(content=" ", left=1, right=0))
    return decoders.Sequence(steps)


def _add_tokens(
    path: Path,
    tokenizer: Tokenizer,
    proto: Any,
    pieces: Sequence[str],
    added: Iterable[tuple[int | None, AddedToken]],
) -> None:
    """Control pieces, then the added tokens, which follow the pieces in the order of their ids."""
    control = [
        AddedToken(piece, special=True, normalized=False)
        for piece, stored in zip(pieces, proto.pieces, strict=True)
        if stored.type in (PieceType.CONTROL, PieceType.UNKNOWN)
    ]
    tokenizer.add_special_tokens(control)
    for token_id, token in sorted(added, key=lambda item: (item[0] is None, item[0])):
        add = tokenizer.add_special_tokens if token.special else tokenizer.add_tokens
        add([token])
        found = tokenizer.token_to_id(token.content)
        if token_id not in (None, found):
            raise CheckpointError(
                f"{path.parent}: added token {token.content!r} has id {token_id}, but would get "
                f"{found} after the {len(pieces)} pieces of {path.name}"
            )


def _added_tokens(
    directory: Path, settings: Mapping[str, Any]
) -> list[tuple[int | None, AddedToken]]:
    """Added tokens with their ids; None for a named one (pad_token) that follows the others."""
    named, special = _special_tokens(directory, settings)
    stated = settings.get("added_tokens_decoder")
    if stated is not None:
        added = [
            (int(token_id), _added_token(directory, entry)) for token_id, entry in stated.items()
        ]
    else:
        path = directory / "added_tokens.json"
        ids = read_json_object(path) if path.exists() else {}
        added = [
            (token_id, special.get(text) or AddedToken(text, normalized=False, special=False))
            for text, token_id in ids.items()
        ]
    known = {token.content for _, token in added}
    return [*added, *((None, special[text]) for text in named if text not in known)]


def _special_tokens(
    directory: Path, settings: Mapping[str, Any]
) -> tuple[list[str], dict[str, AddedToken]]:
    """The texts of the named special tokens, and all special tokens by their texts."""
    path = directory / "special_tokens_map.json"
    stated = (read_json_object(path) if path.exists() else {}) | dict(settings)
    named = [stated[name] for name in _SPECIAL_NAMES if stated.get(name) is not None]
    tokens = [
        _added_token(directory, entry | {"special": True} if isinstance(entry, dict) else entry)
        for entry in (*named, *(stated.get("additional_special_tokens") or []))
    ]
    texts = [token.content for token in tokens]
    return texts[: len(named)], dict(zip(texts, tokens, strict=True))


def _added_token(directory: Path, entry: object) -> AddedToken:
    """A token as the JSON files give it: its text, or a dict with how it is matched. It is
    matched before normalisation, which is no part of an added token's text."""
    if isinstance(entry, str):
        return AddedToken(entry, special=True, normalized=False)
    if not isinstance(entry, dict) or not isinstance(entry.get("content"), str):
        raise CheckpointError(
            f"{directory}: added token {json.dumps(entry)} is neither a text nor an object with "
            "content"
        )
    flags = {
        name: entry.get(name, False) for name in ("lstrip", "rstrip", "single_word", "special")
    }
    return AddedToken(entry["content"], normalized=False, **flags)
