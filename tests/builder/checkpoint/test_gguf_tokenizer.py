"""Tokenizers put into GGUF form here and read back, against the originals."""

import itertools
import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, trainers
from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence, Split
from transformers import PreTrainedTokenizerFast

from llmbuild.builder.checkpoint.pretokenizers import PRETOKENIZERS
from llmbuild.builder.checkpoint.tokenizer import write_tokenizer
from llmbuild.errors import CheckpointError

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6

# As the models' own tokenizer.json files spell them.
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
NEMO = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def split_by(pattern):
    byte_level = ByteLevel(add_prefix_space=False, use_regex=False)
    return Sequence([Split(Regex(pattern), "isolated"), byte_level])


O200K = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
GPT2 = ByteLevel(add_prefix_space=False)
DIGITS = Sequence([Digits(individual_digits=True), GPT2])
CJK = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
DEEPSEEK_LLM = Sequence(
    [
        *(
            Split(Regex(pattern), "isolated")
            for pattern in (
                r"[\r\n]",
                r"\s?[\p{Lu}\p{Ll}\p{Lt}]+",  # their list, but for scripts that no text here has
                "\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+",
                r"\s+$",
                CJK,
            )
        ),
        Digits(individual_digits=False),
        ByteLevel(add_prefix_space=False, use_regex=False),
    ]
)
DEEPSEEK_CODER = Sequence(
    [
        *(
            Split(Regex(pattern), "isolated")
            for pattern in (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", CJK)
        ),
        Digits(individual_digits=True),
        ByteLevel(add_prefix_space=False, use_regex=False),
    ]
)


@dataclass(frozen=True)
class Kind:
    split: Any
    ignore_merges: bool = False
    is_composed: bool = False  # texts go through NFC first


LLAMA3_KIND, QWEN2_KIND = Kind(split_by(LLAMA3), True), Kind(split_by(QWEN2), is_composed=True)
KINDS = {
    **dict.fromkeys(("llama-bpe", "falcon3"), LLAMA3_KIND),
    **dict.fromkeys(("dbrx", "smaug-bpe"), Kind(split_by(LLAMA3))),
    **dict.fromkeys(("qwen2", "stablelm2"), QWEN2_KIND),
    **dict.fromkeys(("smollm", "starcoder", "refact", "exaone"), Kind(DIGITS)),
    **dict.fromkeys(("gpt-2", "phi-2", "exaone4"), Kind(GPT2)),
    **dict.fromkeys(("olmo", "mpt"), Kind(GPT2, is_composed=True)),
    "command-r": Kind(DIGITS, is_composed=True),
    "tekken": Kind(split_by(NEMO), True),
    "gpt-4o": Kind(split_by(O200K)),
    "deepseek-llm": Kind(DEEPSEEK_LLM),
    "deepseek-coder": Kind(DEEPSEEK_CODER),
}


def original_byte_level(pre, texts):
    kind = KINDS[pre]
    tokenizer = Tokenizer(models.BPE())
    if kind.is_composed:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = kind.split
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=900, initial_alphabet=ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(list(texts) * 4, trainer)
    # A word that no merges lead to: found only where merges are ignored for whole words.
    content = json.loads(tokenizer.to_str())
    content["model"]["ignore_merges"] = kind.ignore_merges
    content["model"]["vocab"].setdefault("Ġqzqz", len(content["model"]["vocab"]))
    content["model"]["merges"] = [
        merge for merge in content["model"]["merges"] if "".join(merge) != "Ġqzqz"
    ]
    tokenizer = Tokenizer.from_str(json.dumps(content))
    tokenizer.add_special_tokens(["<|im_start|>", "<|im_end|>", "<|endoftext|>"])
    tokenizer.add_tokens([AddedToken("<tool_call>", special=False, normalized=False)])
    return tokenizer


def byte_level_metadata(tokenizer, pre):
    content = json.loads(tokenizer.to_str())
    ids = tokenizer.get_vocab(with_added_tokens=True)
    tokens = sorted(ids, key=ids.__getitem__)
    types = dict.fromkeys(tokens, NORMAL)
    for added in content["added_tokens"]:
        types[added["content"]] = CONTROL if added["special"] else USER_DEFINED
    assert [ids[token] for token in tokens] == list(range(len(tokens)))
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [types[token] for token in tokens],
        "tokenizer.ggml.merges": [" ".join(merge) for merge in content["model"]["merges"]],
        "tokenizer.ggml.bos_token_id": ids["<|im_start|>"],
        "tokenizer.ggml.eos_token_id": ids["<|im_end|>"],
    }


def converted(path, out):
    write_tokenizer(path, out)
    return Tokenizer.from_file(str(out / "tokenizer.json"))


def generation(path, out):
    write_tokenizer(path, out)
    return json.loads((out / "generation_config.json").read_text())


def with_specials(texts):
    return (
        *texts,
        *("<|im_start|>user\nhi<|im_end|>\n", "a<|endoftext|>b", "<|im_end|><|im_end|> x"),
        *("<tool_call>{}</tool_call>", " <tool_call> ", "<|im_start |>", "x <|im_end|> y"),
    )


@pytest.mark.parametrize("pre", KINDS)
def test_byte_level_tokenizer_gives_the_originals_ids_and_texts(
    pre, texts, hard_texts, check_tokenizer, write_gguf, tmp_path
):
    original = original_byte_level(pre, texts)
    write_tokenizer(write_gguf(byte_level_metadata(original, pre)), tmp_path / "out")
    reference = PreTrainedTokenizerFast(tokenizer_object=original)
    check_tokenizer(reference, tmp_path / "out", with_specials(hard_texts))


@pytest.mark.parametrize("pre", ["qwen2", "deepseek-llm"])
def test_directory_of_the_same_tokenizer_gives_the_same(
    pre, texts, hard_texts, check_tokenizer, tmp_path
):
    reference = PreTrainedTokenizerFast(tokenizer_object=original_byte_level(pre, texts))
    reference.save_pretrained(tmp_path / "model")
    write_tokenizer(tmp_path / "model", tmp_path / "out")
    check_tokenizer(reference, tmp_path / "out", with_specials(hard_texts))


def test_every_kind_is_held_to_an_original():
    aliases = {"llama3", "llama-v3", "llama4", "gpt2", "deepseek-r1-qwen", "default"}
    assert set(PRETOKENIZERS) == set(KINDS) | aliases


def test_whole_word_token_needs_ignored_merges(texts, write_gguf, tmp_path):
    found = {}
    for pre in ("llama-bpe", "gpt-2"):
        original = original_byte_level(pre, texts)
        path = write_gguf(byte_level_metadata(original, pre))
        tokens = converted(path, tmp_path / pre).encode("a qzqz").tokens
        found[pre] = "Ġqzqz" in tokens
    assert found == {"llama-bpe": True, "gpt-2": False}


@pytest.mark.parametrize(
    ("text", "pieces"),
    [
        ("ab12345 c", ["ab", "123", "45", " c"]),
        ("a, b!?", ["a", ",", " b", "!?"]),
        ("x=1 if", ["x", "=", "1", " if"]),
    ],
)
def test_default_splitting_is_that_of_llama_cpp(text, pieces, texts, write_gguf, tmp_path):
    metadata = byte_level_metadata(original_byte_level("gpt-2", texts), "default")
    tokenizer = converted(write_gguf(metadata), tmp_path / "out")
    words = [text[a:b] for _, (a, b) in tokenizer.pre_tokenizer.pre_tokenize_str(text)]
    assert words == pieces


@pytest.mark.parametrize("pre", ["deepseek-v3", "", None])
def test_unknown_pretokenizer_is_refused_with_the_known_ones(pre, texts, write_gguf, tmp_path):
    metadata = byte_level_metadata(original_byte_level("gpt-2", texts[:9]), pre or "")
    if pre is None:
        del metadata["tokenizer.ggml.pre"]
    with pytest.raises(CheckpointError, match=r"tokenizer\.ggml\.pre.*llama-bpe.*qwen2"):
        write_tokenizer(write_gguf(metadata), tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("kind", ["t5", "bert", "rwkv", "none"])
def test_other_tokenizer_model_is_refused(kind, write_gguf, tmp_path):
    path = write_gguf({"tokenizer.ggml.model": kind})
    with pytest.raises(CheckpointError, match=rf"tokenizer\.ggml\.model is '{kind}'.*gpt2.*llama"):
        write_tokenizer(path, tmp_path / "out")


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"tokenizer.ggml.merges": ["qq zz"]}, "merges"),
        ({"tokenizer.ggml.merges": ["ab"]}, "merges"),
        ({"tokenizer.ggml.merges": [1, 2]}, "merges"),
        ({"tokenizer.ggml.token_type": [1, 1]}, "token_type"),
        ({"tokenizer.ggml.tokens": ["a", "b", "a"]}, "'a'"),
        ({"tokenizer.ggml.tokens": "abc"}, "tokens"),
        ({"tokenizer.ggml.eos_token_id": 10**6}, "eos_token_id"),
        ({"tokenizer.ggml.bos_token_id": "x"}, "bos_token_id"),
        ({"tokenizer.ggml.add_bos_token": 1}, "add_bos_token"),
        ({"tokenizer.chat_template": 1}, "chat_template"),
    ],
    ids=str,
)
def test_contradicting_tables_are_refused(change, word, texts, write_gguf, tmp_path):
    metadata = byte_level_metadata(original_byte_level("gpt-2", texts[:9]), "gpt-2")
    path = write_gguf(metadata | change)
    with pytest.raises(CheckpointError, match=word) as caught:
        write_tokenizer(path, tmp_path / "out")
    assert str(path) in str(caught.value)
    assert not (tmp_path / "out").exists()


def train_sentencepiece(directory: Path, texts, **options) -> sentencepiece.SentencePieceProcessor:
    corpus = [line for text in texts for line in text.splitlines() if line.strip()] * 3
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(corpus),
        model_prefix=str(directory / "spm"),
        model_type="bpe",
        vocab_size=700,
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        allow_whitespace_only_pieces=True,
        split_digits=True,
        character_coverage=0.98,
        minloglevel=2,
        **options,
    )
    return sentencepiece.SentencePieceProcessor(model_file=str(directory / "spm.model"))


def sentencepiece_metadata(model):
    def kind(token_id):
        if model.is_unknown(token_id):
            return UNKNOWN
        if model.is_control(token_id):
            return CONTROL
        return BYTE if model.is_byte(token_id) else NORMAL

    ids = range(model.get_piece_size())
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.tokens": [model.id_to_piece(i) for i in ids],
        "tokenizer.ggml.scores": [float(model.get_score(i)) for i in ids],
        "tokenizer.ggml.token_type": [kind(i) for i in ids],
    }


@pytest.mark.parametrize("add_dummy_prefix", [True, False])
def test_sentencepiece_tokenizer_gives_the_originals_ids_and_texts(
    add_dummy_prefix, texts, write_gguf, tmp_path
):
    model = train_sentencepiece(tmp_path, texts, add_dummy_prefix=add_dummy_prefix)
    metadata = sentencepiece_metadata(model)
    if not add_dummy_prefix:
        metadata["tokenizer.ggml.add_space_prefix"] = False
    tokenizer = converted(write_gguf(metadata), tmp_path / "out")
    for text in texts:
        expected = model.encode(text)
        assert tokenizer.encode(text).ids == expected, text
        assert tokenizer.decode(expected) == model.decode(expected)


def test_sentencepiece_special_tokens_are_found_in_text(texts, write_gguf, tmp_path):
    model = train_sentencepiece(tmp_path, texts)
    metadata = sentencepiece_metadata(model)
    metadata["tokenizer.ggml.tokens"].append("<tool>")
    metadata["tokenizer.ggml.scores"].append(0.0)
    metadata["tokenizer.ggml.token_type"].append(USER_DEFINED)
    tokenizer = converted(write_gguf(metadata), tmp_path / "out")
    tool = model.get_piece_size()
    ids = tokenizer.encode("<s>Hello world</s><tool>1").ids
    # As in llama.cpp, the text after a special token starts with a space of its own.
    assert ids == [1, *model.encode("Hello world"), 2, tool, *model.encode("1")]
    assert tokenizer.decode(ids) == "Hello world<tool> 1"
    assert tokenizer.token_to_id("<unk>") == 0


def test_gemmas_runs_of_spaces_and_newlines_are_tokens(texts, write_gguf, tmp_path):
    """Which its files list as user-defined, beside add_space_prefix = false."""
    model = train_sentencepiece(tmp_path, texts, add_dummy_prefix=False)
    metadata = sentencepiece_metadata(model) | {"tokenizer.ggml.add_space_prefix": False}
    for token in ("  ", "   ", "\n\n", "<end_of_turn>"):
        metadata["tokenizer.ggml.tokens"].append(token)
        metadata["tokenizer.ggml.scores"].append(-1000.0)
        metadata["tokenizer.ggml.token_type"].append(USER_DEFINED)
    metadata["tokenizer.ggml.token_type"][-1] = CONTROL
    path, size = write_gguf(metadata), model.get_piece_size()
    tokenizer = converted(path, tmp_path / "out")
    ids = tokenizer.encode("a   b  c\n\n<end_of_turn>d").ids
    pieces = [model.piece_to_id(letter) for letter in "abcd"]
    assert ids == [
        *(pieces[0], size + 1, pieces[1], size, pieces[2], size + 2, size + 3, pieces[3])
    ]
    assert tokenizer.decode(ids) == "a   b  c\n\nd"
    assert generation(path, tmp_path / "out")["eos_token_id"] == [2, size + 3]


def test_sentencepiece_without_scores_is_refused(texts, write_gguf, tmp_path):
    metadata = sentencepiece_metadata(train_sentencepiece(tmp_path, texts))
    del metadata["tokenizer.ggml.scores"]
    with pytest.raises(CheckpointError, match=r"tokenizer\.ggml\.scores"):
        write_tokenizer(write_gguf(metadata), tmp_path / "out")


def test_large_sentencepiece_vocabulary_converts_in_seconds(write_gguf, tmp_path):
    """Every cut of every token is looked up: here 32000 tokens of up to 16 characters."""
    letters = "abcdefghijklmnopqrstuvwxyz"
    words = ("".join(word) for n in (1, 2, 3) for word in itertools.product(letters, repeat=n))
    long_words = (
        "".join(word) * n for word in itertools.product(letters, repeat=4) for n in (1, 2, 4)
    )
    unique = dict.fromkeys(["<unk>", "<s>", "</s>", *words, *long_words])
    tokens = list(unique)[:32000]
    metadata = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": [-float(i) for i in range(len(tokens))],
        "tokenizer.ggml.token_type": [UNKNOWN, CONTROL, CONTROL, *[NORMAL] * (len(tokens) - 3)],
    }
    path = write_gguf(metadata)
    start = time.perf_counter()
    tokenizer = converted(path, tmp_path / "out")
    assert time.perf_counter() - start < 30
    assert tokenizer.get_vocab_size() == 32000


def test_prompts_start_with_bos_where_llama_cpp_adds_it(texts, write_gguf, tmp_path):
    found = {}
    for pre in ("smollm", "llama-bpe", "qwen2", "tekken"):
        metadata = byte_level_metadata(original_byte_level(pre, texts[:9]), pre)
        found[pre] = generation(write_gguf(metadata), tmp_path / pre)["add_bos"]
        stated = metadata | {"tokenizer.ggml.add_bos_token": not found[pre]}
        assert generation(write_gguf(stated), tmp_path / pre)["add_bos"] is not found[pre]
    metadata = sentencepiece_metadata(train_sentencepiece(tmp_path, texts))
    spm = generation(write_gguf(metadata), tmp_path / "spm")
    assert found == {"smollm": False, "llama-bpe": True, "qwen2": False, "tekken": True}
    assert spm == {"bos_token_id": 1, "eos_token_id": [2], "add_bos": True}


def test_every_token_that_ends_a_turn_is_an_eos(texts, write_gguf, tmp_path):
    original = original_byte_level("llama-bpe", texts[:9])
    original.add_special_tokens(["<|end_of_text|>", "<|eom_id|>", "<|eot_id|>", "<stop>"])
    original.add_tokens([AddedToken("<end_of_turn>", special=False, normalized=False)])
    ids = original.get_vocab()
    metadata = byte_level_metadata(original, "llama-bpe") | {
        "tokenizer.ggml.eos_token_id": ids["<|end_of_text|>"],
        "tokenizer.ggml.eot_token_id": ids["<stop>"],
    }
    eos = generation(write_gguf(metadata), tmp_path / "out")["eos_token_id"]
    assert eos[0] == ids["<|end_of_text|>"]
    names = {"<|end_of_text|>", "<stop>", "<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|endoftext|>"}
    assert sorted(eos) == sorted(ids[name] for name in names)
    assert ids["<end_of_turn>"] not in eos  # not a control token in this file


def test_bos_that_is_to_be_added_must_be_named(texts, write_gguf, tmp_path):
    metadata = byte_level_metadata(original_byte_level("llama-bpe", texts[:9]), "llama-bpe")
    del metadata["tokenizer.ggml.bos_token_id"]
    with pytest.raises(CheckpointError, match="BOS"):
        write_tokenizer(write_gguf(metadata), tmp_path / "out")


def test_chat_template_is_written_as_stored(texts, write_gguf, tmp_path):
    metadata = byte_level_metadata(original_byte_level("gpt-2", texts[:9]), "gpt-2")
    template = "{% for m in messages %}\r\n{{ m['content'] }} é👍\n{% endfor %}"
    out = tmp_path / "out"
    assert write_tokenizer(write_gguf(metadata), out) == [
        "tokenizer.json",
        "generation_config.json",
    ]
    names = write_tokenizer(write_gguf(metadata | {"tokenizer.chat_template": template}), out)
    assert names == ["tokenizer.json", "generation_config.json", "chat_template.jinja"]
    assert (out / "chat_template.jinja").read_bytes() == template.encode()
