import json

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import models

from llmbuild.errors import EngineError, RequestError
from llmbuild.runtime.tokenizer import GenerationConfig, Tokenizer, load_tokenizer


def test_bos_is_added_once(sentencepiece):
    assert sentencepiece.encode("a")[0] == 1
    assert sentencepiece.encode("<s>a").count(1) == 1
    assert sentencepiece.encode("<s><s>a").count(1) == 2  # asked for by the text itself
    assert sentencepiece.encode("") == [1]


def test_bos_is_left_out_when_the_model_or_the_caller_wants_none(byte_level, sentencepiece):
    assert byte_level.encode("hello") == byte_level.encode("hello", with_bos=False)
    assert 1 not in sentencepiece.encode("a", with_bos=False)
    assert byte_level.encode("") == []


@pytest.mark.parametrize("add_bos", [True, False])
@pytest.mark.parametrize("text", ["a", "", "<s>", "<s>a", " <s>a", "a<s>"])
def test_bos_that_the_text_brings_stays_the_only_one(sentencepiece, add_bos, text):
    tokenizer = Tokenizer(sentencepiece._backend, GenerationConfig(1, [2, 5], add_bos))
    ids = tokenizer.encode(text)
    brings = text.startswith("<s>")
    assert (ids[:1] == [1]) is (add_bos or brings)
    assert ids.count(1) == text.count("<s>") + (add_bos and not brings)
    assert tokenizer.eos_ids == {2, 5}
    assert tokenizer.eos_token == "</s>"  # the first


def test_special_tokens_in_text_are_taken_as_such(byte_level):
    ids = byte_level.encode("he<|end|>llo<think>")
    assert byte_level.eos_ids & set(ids)
    assert byte_level.decode(ids) == "hello<think>"


def test_bos_and_eos_text_come_from_their_ids(byte_level, sentencepiece):
    assert (byte_level.bos_token, byte_level.eos_token) == ("<|begin|>", "<|end|>")
    assert (sentencepiece.bos_token, sentencepiece.eos_token) == ("<s>", "</s>")


def test_text_with_a_lone_surrogate_is_refused(byte_level):
    with pytest.raises(RequestError, match=r"lone surrogate.*character 2"):
        byte_level.encode("ab\udcff")


def write_engine(root, tokenizer, config):
    tokenizer._backend.save(str(root / "tokenizer.json"))
    (root / "generation_config.json").write_text(json.dumps(config))


GOOD = {"bos_token_id": 1, "eos_token_id": [2, 5], "add_bos": True}


def test_tokenizer_of_an_engine_is_loaded(tmp_path, sentencepiece):
    write_engine(tmp_path, sentencepiece, GOOD)
    loaded = load_tokenizer(tmp_path)
    assert loaded.encode("the a") == sentencepiece.encode("the a")
    assert loaded.eos_ids == {2, 5}


def test_model_without_bos_is_loaded(tmp_path, sentencepiece):
    config = {"bos_token_id": None, "eos_token_id": [], "add_bos": False}
    write_engine(tmp_path, sentencepiece, config)
    loaded = load_tokenizer(tmp_path)
    assert (loaded.bos_token, loaded.eos_token, loaded.eos_ids) == (None, None, frozenset())
    assert loaded.encode("") == []


@pytest.mark.parametrize(
    "config",
    [{}, {**GOOD, "other": 1}, {**GOOD, "eos_token_id": 2}, {**GOOD, "bos_token_id": "<s>"}],
)
def test_malformed_generation_config_is_refused(tmp_path, sentencepiece, config):
    write_engine(tmp_path, sentencepiece, config)
    with pytest.raises(EngineError, match=r"generation_config\.json can't be read"):
        load_tokenizer(tmp_path)


def test_missing_or_broken_tokenizer_is_refused(tmp_path, sentencepiece):
    with pytest.raises(EngineError, match=r"generation_config\.json"):
        load_tokenizer(tmp_path)
    write_engine(tmp_path, sentencepiece, GOOD)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(EngineError, match=r"tokenizer\.json can't be read"):
        load_tokenizer(tmp_path)


def test_truncation_and_padding_of_the_file_are_off(sentencepiece):
    backend = type(sentencepiece._backend).from_str(sentencepiece._backend.to_str())
    backend.enable_truncation(2)
    backend.enable_padding(length=50)
    tokenizer = Tokenizer(backend, GenerationConfig(1, [2], True))
    assert tokenizer.encode("the a") == sentencepiece.encode("the a")


def test_file_is_parsed_with_its_merges_when_the_first_text_comes(tmp_path, byte_level):
    config = {"bos_token_id": None, "eos_token_id": [], "add_bos": False}
    write_engine(tmp_path, byte_level, config)
    loaded = load_tokenizer(tmp_path)
    ids = [*range(270), 5, 261, 264]
    assert loaded.decode(ids) == byte_level.decode(ids)
    assert [loaded.pieces[i] for i in ids] == [byte_level.pieces[i] for i in ids]
    assert "_encoder" not in vars(loaded)
    text = "hello world 你 😀 <think>"
    assert loaded.encode(text) == byte_level.encode(text)
    assert len(loaded.encode("he")) == 1
    assert loaded._encoder is not loaded._backend


def test_file_without_merges_is_parsed_once(tmp_path):
    backend = Backend(models.WordLevel({"a": 0, "b": 1, "[UNK]": 2}, unk_token="[UNK]"))
    config = {"bos_token_id": None, "eos_token_id": [], "add_bos": False}
    write_engine(tmp_path, Tokenizer(backend, GenerationConfig(None, [], False)), config)
    loaded = load_tokenizer(tmp_path)
    assert loaded.encode("b") == [1]
    assert loaded._encoder is loaded._backend


def test_pieces_tell_special_unknown_and_byte_tokens(byte_level, sentencepiece):
    assert byte_level.pieces[byte_level._backend.token_to_id("<|end|>")].is_silent
    assert byte_level.pieces[10**6].is_silent
    assert sentencepiece.pieces[3 + 0x41].is_byte
    word = sentencepiece.pieces[sentencepiece._backend.token_to_id("th")]
    assert word == (False, False, "th")
