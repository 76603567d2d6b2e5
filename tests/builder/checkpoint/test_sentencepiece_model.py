"""Directories whose tokenizer is a SentencePiece model alone, against transformers."""

import json
import sys

import pytest
import sentencepiece
from tokenizers import Tokenizer
from transformers import AutoTokenizer

from llmbuild.builder.checkpoint.tokenizer import write_tokenizer
from llmbuild.errors import CheckpointError

LLAMA = {"tokenizer_class": "LlamaTokenizer", "bos_token": "<s>", "eos_token": "</s>"}
ADDED = {
    "added_tokens_decoder": {
        "0": {"content": "<unk>", "special": True},
        "1": {"content": "<s>", "special": True},
        "2": {"content": "</s>", "special": True},
        "600": {"content": "<tool_call>", "special": False, "normalized": True},
        "601": {"content": "<|im_end|>", "special": True, "rstrip": True},
    }
}
OLD_FILES = {
    "added_tokens": {"<pad>": 600, "<tool_call>": 601},
    "special_tokens_map": {
        "bos_token": {"content": "<s>"},
        "eos_token": "</s>",
        "pad_token": "<pad>",
    },
}
PREFIXLESS = {
    "add_dummy_prefix": False,
    "control_symbols": ["<end_of_turn>"],
    "bos_piece": "<bos>",
    "eos_piece": "<eos>",
}
NFKC = {"normalization_rule_name": "nmt_nfkc", "remove_extra_whitespaces": True}
USER_DEFINED = {"user_defined_symbols": ["<tool_call>", "ab"]}
UNIGRAM = {"model_type": "unigram", "vocab_size": 450, "hard_vocab_limit": False}


@pytest.fixture(scope="session")
def train(tmp_path_factory, hard_texts):
    """train(**options): bytes of a small SentencePiece model, by default such as Llama 2's."""
    known = {}

    def make(**options):
        key = json.dumps(options)
        if key not in known:
            folder = tmp_path_factory.mktemp("spm")
            lines = [line for text in hard_texts for line in text[:60].splitlines() if line.strip()]
            defaults = {
                "model_type": "bpe",
                "vocab_size": 600,
                "byte_fallback": True,
                "normalization_rule_name": "identity",
                "remove_extra_whitespaces": False,
                "allow_whitespace_only_pieces": True,
                "split_digits": True,
                "character_coverage": 0.98,
                "minloglevel": 2,
            }
            sentencepiece.SentencePieceTrainer.train(
                sentence_iterator=iter([line.replace("\0", "") for line in lines] * 3),
                model_prefix=str(folder / "spm"),
                **(defaults | options),
            )
            known[key] = (folder / "spm.model").read_bytes()
        return known[key]

    return make


@pytest.fixture
def save(tmp_path):
    """save(model, model_type, **files): a directory with these JSON files and no tokenizer.json."""

    def write(model, model_type="llama", **files):
        directory = tmp_path / "model"
        directory.mkdir()
        (directory / "tokenizer.model").write_bytes(model)
        for name, content in ({"config": {"model_type": model_type}} | files).items():
            (directory / f"{name}.json").write_text(json.dumps(content))
        return directory

    return write


CASES = {  # training options, model_type, files
    "llama": ({}, "llama", {"tokenizer_config": LLAMA}),
    "llama-legacy": ({}, "llama", {"tokenizer_config": LLAMA | {"legacy": True}}),
    "llama-added": ({}, "llama", {"tokenizer_config": LLAMA | ADDED | {"legacy": False}}),
    "mistral": ({}, "mistral", {"tokenizer_config": LLAMA | {"legacy": True}}),
    "mistral-first": ({}, "mistral", {"tokenizer_config": LLAMA | {"legacy": False}}),
    "phi3-added": ({}, "phi3", {"tokenizer_config": LLAMA | ADDED}),
    "old-files": ({}, "mistral", OLD_FILES),
    "bare": ({}, "granite", {}),
    "user-defined": (USER_DEFINED, "mistral", {}),
    "gemma": (PREFIXLESS, "gemma2", {"tokenizer_config": {"tokenizer_class": "GemmaTokenizer"}}),
    "nfkc": (NFKC, "mistral", {}),
    "unigram": (UNIGRAM, "mistral", {}),
    "unigram-added": (UNIGRAM, "mistral", {"tokenizer_config": {"legacy": False}}),
    "unigram-nfkc": (UNIGRAM | NFKC | USER_DEFINED, "mistral", {}),
    "unigram-unknowns": (UNIGRAM | {"byte_fallback": False}, "mistral", {}),
}


@pytest.mark.parametrize("case", CASES)
def test_ids_and_texts_equal_those_of_transformers(
    case, train, save, hard_texts, check_tokenizer, tmp_path
):
    options, model_type, files = CASES[case]
    directory = save(train(**options), model_type, **files)
    write_tokenizer(directory, tmp_path / "out")
    check_tokenizer(AutoTokenizer.from_pretrained(directory), tmp_path / "out", hard_texts)


@pytest.mark.parametrize("options", [{}, UNIGRAM, USER_DEFINED], ids=["bpe", "unigram", "pieces"])
def test_ids_equal_those_of_sentencepiece(options, train, save, hard_texts, tmp_path):
    """Which finds no special tokens in a text, and no dummy prefix after them."""
    directory = save(train(**options), "mistral")
    write_tokenizer(directory, tmp_path / "out")
    tokenizer = Tokenizer.from_file(str(tmp_path / "out" / "tokenizer.json"))
    model = sentencepiece.SentencePieceProcessor(model_file=str(directory / "tokenizer.model"))
    apart = [text for text in hard_texts if "<" not in text and "\0" not in text]
    assert len(apart) > 120
    for text in apart:
        assert tokenizer.encode(text, add_special_tokens=False).ids == model.encode(text), text


def test_special_ids_come_from_the_json_files(train, save, tmp_path):
    directory = save(train(), tokenizer_config=LLAMA | {"add_bos_token": True})
    write_tokenizer(directory, tmp_path / "out")
    assert json.loads((tmp_path / "out" / "generation_config.json").read_text()) == {
        "bos_token_id": 1,
        "eos_token_id": [2],
        "add_bos": True,
    }


def test_special_ids_come_from_the_special_tokens_map(train, save, tmp_path):
    write_tokenizer(save(train(), **OLD_FILES), tmp_path / "out")
    found = json.loads((tmp_path / "out" / "generation_config.json").read_text())
    assert (found["bos_token_id"], found["eos_token_id"]) == (1, [2])


def test_pieces_take_the_names_of_added_tokens(train, save, tmp_path):
    """InternLM 2 keeps unused pieces for them."""
    named = {"added_tokens_decoder": {"7": {"content": "<|im_start|>", "special": True}}}
    write_tokenizer(save(train(), "internlm2", tokenizer_config=named), tmp_path / "out")
    tokenizer = Tokenizer.from_file(str(tmp_path / "out" / "tokenizer.json"))
    assert tokenizer.encode("<|im_start|>").ids == [7]
    assert tokenizer.get_vocab_size() == 600


def refused(directory, tmp_path, *words):
    with pytest.raises(CheckpointError) as caught:
        write_tokenizer(directory, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    for word in (str(directory), *words):
        assert word in str(caught.value)


def test_added_token_whose_id_cannot_be_had_is_refused(train, save, tmp_path):
    apart = {"added_tokens_decoder": {"700": {"content": "<far>", "special": True}}}
    refused(save(train(), tokenizer_config=apart), tmp_path, "<far>", "700", "600")


@pytest.mark.parametrize("model", [b"", b"IQ== 0\nIg== 1\n", b"\x00\xff"])
def test_file_that_is_no_sentencepiece_model_is_refused(model, save, tmp_path):
    refused(save(model), tmp_path, "tokenizer.model", "isn't a SentencePiece model")


@pytest.mark.parametrize("kind", ["char", "word"])
def test_other_kinds_of_model_are_refused(kind, train, save, tmp_path):
    options = {"model_type": kind, "vocab_size": 300, "hard_vocab_limit": False}
    model = train(**options, byte_fallback=False)
    refused(save(model), tmp_path, "unigram (1) and BPE (2)")


def test_spaces_at_the_end_of_pieces_are_refused(train, save, tmp_path):
    refused(save(train(treat_whitespace_as_suffix=True)), tmp_path, "treat_whitespace_as_suffix")


def test_malformed_added_token_is_refused(train, save, tmp_path):
    refused(save(train(), special_tokens_map={"bos_token": {"text": "<s>"}}), tmp_path, "content")


def test_missing_sentencepiece_package_is_named(train, save, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "sentencepiece", None)
    refused(save(train()), tmp_path, "sentencepiece package", ".[build]")
