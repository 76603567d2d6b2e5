"""How byte-level BPE tokenizers split text into words, by the name that GGUF files give it.

The patterns are those of the named models' published tokenizers, as llama.cpp's
llama-vocab.cpp records them.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from tokenizers import Regex
from tokenizers.normalizers import NFC, Normalizer
from tokenizers.pre_tokenizers import ByteLevel, Digits, PreTokenizer, Sequence, Split


@dataclass(frozen=True)
class Pretokenizer:
    """split: text to byte-level words; ignore_merges: a word that is itself a token is taken
    whole; add_bos: whether prompts start with BOS unless the file says otherwise."""

    split: PreTokenizer
    normalizer: Normalizer | None = None
    ignore_merges: bool = False
    add_bos: bool = False


_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"

_LLAMA3 = (
    _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|" + _SPACES
)
_QWEN2 = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|" + _SPACES
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
    + r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|"
    + _SPACES
)
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
_DEFAULT = (r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]")


def _split(*patterns: str) -> PreTokenizer:
    """Each pattern in turn cuts its matches out of the pieces that the ones before it left."""
    splits: list[PreTokenizer] = [Split(Regex(pattern), "isolated") for pattern in patterns]
    return Sequence([*splits, ByteLevel(add_prefix_space=False, use_regex=False)])


_LLAMA3_KIND = Pretokenizer(_split(_LLAMA3), ignore_merges=True, add_bos=True)
_GPT2_KIND = Pretokenizer(ByteLevel(add_prefix_space=False))

PRETOKENIZERS: Mapping[str, Pretokenizer] = {
    "llama-bpe": _LLAMA3_KIND,
    "llama3": _LLAMA3_KIND,
    "qwen2": Pretokenizer(_split(_QWEN2), normalizer=NFC()),
    "tekken": Pretokenizer(_split(_TEKKEN), ignore_merges=True, add_bos=True),
    "smollm": Pretokenizer(
        Sequence([Digits(individual_digits=True), ByteLevel(add_prefix_space=False)])
    ),
    "gpt-2": _GPT2_KIND,
    "gpt2": _GPT2_KIND,
    "default": Pretokenizer(_split(*_DEFAULT)),
}
