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
_GPT4O = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_CONTRACTIONS}?"
    + rf"|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_CONTRACTIONS}?"
    + r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|"
    + _SPACES
)
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
_DEFAULT = (r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]")


def _split(*patterns: str) -> PreTokenizer:
    """Each pattern in turn cuts its matches out of the pieces that the ones before it left."""
    splits: list[PreTokenizer] = [Split(Regex(pattern), "isolated") for pattern in patterns]
    return Sequence([*splits, ByteLevel(add_prefix_space=False, use_regex=False)])


def _class(ranges: str) -> str:
    """A character class from code points, written as hexadecimal ranges."""
    pairs = (item.partition("-") for item in ranges.split())
    return "".join(rf"\x{{{first}}}-\x{{{last or first}}}" for first, _, last in pairs)


# Cased letters as the tokenizer's authors listed them: some scripts lack their small letters.
_DEEPSEEK_CASED = _class(
    "41-5A 61-7A B5 C0-D6 D8-F6 F8-1BA 1BC-1BF 1C4-293 295-2AF 370-373 376-377 37B-37D 37F 386 "
    "388-38A 38C 38E-3A1 3A3-3F5 3F7-481 48A-52F 531-556 10A0-10C5 13A0-13F5 13F8-13FD 1C90-1CBA "
    "1CBD-1CBF 1D00-1D2B 1D6B-1D77 1D79-1D9A 1E00-1F15 1F18-1F1D 1F20-1F45 1F48-1F4D 1F50-1F57 "
    "1F59 1F5B 1F5D 1F5F-1F7D 1F80-1FB4 1FB6-1FBC 1FBE 1FC2-1FC4 1FC6-1FCC 1FD0-1FD3 1FD6-1FDB "
    "1FE0-1FEC 1FF2-1FF4 1FF6-1FFC 2102 2107 210A-2113 2115 2119-211D 2124 2126 2128 212A-212D "
    "212F-2134 2139 213C-213F 2145-2149 214E 2183-2184 2C00-2C7B 2C7E-2CE4 2CEB-2CEE 2CF2-2CF3 "
    "A640-A66D A680-A69B A722-A76F A771-A787 A78B-A78E AB70-ABBF FB00-FB06 FB13-FB17 FF21-FF3A "
    "FF41-FF5A 10400-1044F 104B0-104D3 104D8-104FB 10C80-10CB2 10CC0-10CF2 118A0-118DF 1E900-1E943"
)
_DEEPSEEK_PUNCTUATION = _class("21-2F 3A-7E FF01-FF0F FF1A-FF5E 2018-201F 3000-3002")
_DEEPSEEK_CJK = f"[{_class('4E00-9FA5 800-4E00 AC00-D7FF')}]+"
_DEEPSEEK_LLM = (
    *(r"[\r\n]", rf"\s?[{_DEEPSEEK_CASED}]+", rf"\s?[{_DEEPSEEK_PUNCTUATION}]+", r"\s+$"),
    *(_DEEPSEEK_CJK, r"\p{N}+"),
)
_DEEPSEEK_CODER = (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _DEEPSEEK_CJK, r"\p{N}")

_DIGITS_APART = Sequence([Digits(individual_digits=True), ByteLevel(add_prefix_space=False)])
_LLAMA3_KIND = Pretokenizer(_split(_LLAMA3), ignore_merges=True, add_bos=True)
_CL100K_KIND = Pretokenizer(_split(_LLAMA3))
_QWEN2_KIND = Pretokenizer(_split(_QWEN2), normalizer=NFC())
_GPT2_KIND = Pretokenizer(ByteLevel(add_prefix_space=False))
_NEOX_KIND = Pretokenizer(ByteLevel(add_prefix_space=False), normalizer=NFC())
_STARCODER_KIND = Pretokenizer(_DIGITS_APART)
_GPT4O_KIND = Pretokenizer(_split(_GPT4O))

PRETOKENIZERS: Mapping[str, Pretokenizer] = {
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3"), _LLAMA3_KIND),
    **dict.fromkeys(("dbrx", "smaug-bpe"), _CL100K_KIND),  # OLMo 2, Granite 4, phi-4; SmolLM3
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "stablelm2"), _QWEN2_KIND),
    "tekken": Pretokenizer(_split(_TEKKEN), ignore_merges=True, add_bos=True),
    **dict.fromkeys(("gpt-4o", "llama4"), _GPT4O_KIND),
    **dict.fromkeys(("starcoder", "refact", "smollm", "exaone"), _STARCODER_KIND),
    "command-r": Pretokenizer(_DIGITS_APART, normalizer=NFC()),
    **dict.fromkeys(("gpt-2", "gpt2", "phi-2", "exaone4"), _GPT2_KIND),
    **dict.fromkeys(("olmo", "mpt"), _NEOX_KIND),  # OLMo 1, GPT-NeoX, Pythia
    "deepseek-llm": Pretokenizer(_split(*_DEEPSEEK_LLM)),
    "deepseek-coder": Pretokenizer(_split(*_DEEPSEEK_CODER)),
    "default": Pretokenizer(_split(*_DEFAULT)),
}
