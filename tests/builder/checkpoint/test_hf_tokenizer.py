import json
import os
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from llmbuild.builder.checkpoint.files import read_json_object
from llmbuild.builder.checkpoint.tokenizer import write_tokenizer
from llmbuild.errors import CheckpointError


@pytest.fixture
def tokenizer():
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<s>", "</s>", "<|im_end|>"],
        show_progress=False,
    )
    tokenizer.train_from_iterator(["the cat sat on the mat", "hello"], trainer)
    return tokenizer


@pytest.fixture
def save(tmp_path, tokenizer):
    """Writes the tokenizer and further JSON files into a model directory."""
    directory = tmp_path / "model"
    directory.mkdir()

    def write(**files):
        tokenizer.save(str(directory / "tokenizer.json"))
        for name, content in files.items():
            (directory / f"{name}.json").write_text(json.dumps(content))
        return directory

    return write


def generation(directory):
    out = directory.parent / "out"
    write_tokenizer(directory, out)
    return json.loads((out / "generation_config.json").read_text())


def refused(directory, *words):
    out = directory.parent / "out"
    with pytest.raises(CheckpointError) as caught:
        write_tokenizer(directory, out)
    assert not out.exists()
    for word in (str(directory), *words):
        assert word in str(caught.value)


def test_tokenizer_json_is_copied_byte_for_byte(save):
    directory = save()
    names = write_tokenizer(directory, directory.parent / "a" / "b")
    assert names == ["tokenizer.json", "generation_config.json"]
    copy = (directory.parent / "a" / "b" / "tokenizer.json").read_bytes()
    assert copy == (directory / "tokenizer.json").read_bytes()


def test_truncation_and_padding_do_not_reach_prompts(save, tokenizer):
    plain = tokenizer.encode("the cat sat on the mat").ids
    tokenizer.enable_truncation(3)
    tokenizer.enable_padding(length=50)
    directory = save()
    write_tokenizer(directory, directory.parent / "out")
    written = Tokenizer.from_file(str(directory.parent / "out" / "tokenizer.json"))
    assert written.encode("the cat sat on the mat").ids == plain


def test_eos_comes_from_generation_config_first(save):
    directory = save(
        generation_config={"eos_token_id": [2, 1, 2]},
        config={"eos_token_id": 0},
        tokenizer_config={"eos_token": "<s>"},
    )
    assert generation(directory)["eos_token_id"] == [2, 1]


def test_eos_then_comes_from_config(save):
    directory = save(
        generation_config={"eos_token_id": None},
        config={"eos_token_id": 1},
        tokenizer_config={"eos_token": "<s>"},
    )
    assert generation(directory)["eos_token_id"] == [1]


@pytest.mark.parametrize("eos_token", ["<|im_end|>", {"content": "<|im_end|>", "special": True}])
def test_eos_last_comes_from_the_tokenizers_config(eos_token, save):
    assert generation(save(tokenizer_config={"eos_token": eos_token}))["eos_token_id"] == [2]


def test_bos_is_added_where_the_template_adds_it(save, tokenizer):
    assert generation(save(config={"bos_token_id": 0})) == {
        "bos_token_id": 0,
        "eos_token_id": [],
        "add_bos": False,
    }
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 1)]
    )
    found = generation(save(config={"bos_token_id": 1}))
    assert found == {"bos_token_id": 0, "eos_token_id": [], "add_bos": True}


@pytest.mark.parametrize("stated", [True, False])
def test_stated_add_bos_token_decides(stated, save, tokenizer):
    if not stated:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", 0)]
        )
    directory = save(tokenizer_config={"add_bos_token": stated, "bos_token": "<s>"})
    assert generation(directory) == {"bos_token_id": 0, "eos_token_id": [], "add_bos": stated}


def test_template_that_only_appends_adds_no_bos(save, tokenizer):
    tokenizer.post_processor = processors.TemplateProcessing(
        single="$A </s>", special_tokens=[("</s>", 1)]
    )
    assert generation(save())["add_bos"] is False


def test_template_with_two_tokens_before_the_text_is_refused(save, tokenizer):
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> </s> $A", special_tokens=[("<s>", 0), ("</s>", 1)]
    )
    refused(save(), "[0, 1]")


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("plain", "plain"),
        ([{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}], "d"),
    ],
)
def test_chat_template_of_the_tokenizers_config_is_taken(template, expected, save):
    directory = save(tokenizer_config={"chat_template": template})
    names = write_tokenizer(directory, directory.parent / "out")
    assert names == ["tokenizer.json", "generation_config.json", "chat_template.jinja"]
    assert (directory.parent / "out" / "chat_template.jinja").read_text() == expected


def test_template_files_stand_before_the_tokenizers_config(save):
    directory = save(
        tokenizer_config={"chat_template": "config"}, chat_template={"chat_template": "json"}
    )
    written = directory.parent / "out" / "chat_template.jinja"
    write_tokenizer(directory, directory.parent / "out")
    assert written.read_text() == "json"
    (directory / "chat_template.jinja").write_bytes("{{ é }}\r\n".encode())
    write_tokenizer(directory, directory.parent / "out")
    assert written.read_bytes() == "{{ é }}\r\n".encode()


@pytest.mark.parametrize(
    ("files", "word"),
    [
        ({"generation_config": {"eos_token_id": "</s>"}}, "eos_token_id"),
        ({"generation_config": {"eos_token_id": [1, -1]}}, "eos_token_id"),
        ({"generation_config": {"eos_token_id": True}}, "eos_token_id"),
        ({"config": {"eos_token_id": 300000}}, "[300000]"),
        ({"tokenizer_config": {"eos_token": "<absent>"}}, "<absent>"),
        ({"tokenizer_config": {"add_bos_token": "yes"}}, "add_bos_token"),
        ({"tokenizer_config": {"add_bos_token": True}}, "no BOS"),
        ({"tokenizer_config": {"chat_template": 3}}, "chat_template"),
        ({"tokenizer_config": {"chat_template": [{"name": "rag", "template": ""}]}}, "rag"),
        ({"tokenizer_config": []}, "tokenizer_config.json"),
    ],
    ids=str,
)
def test_malformed_settings_are_refused(files, word, save):
    refused(save(**files), word)


def test_missing_tokenizer_is_named(save):
    directory = save()
    (directory / "tokenizer.json").unlink()
    refused(directory, "tokenizer.json", "missing")


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"model": {"type": "BPE"}}'])
def test_malformed_tokenizer_json_is_refused(text, save):
    directory = save()
    (directory / "tokenizer.json").write_text(text)
    refused(directory, "tokenizer.json")


def test_path_without_a_tokenizer_is_refused(tmp_path):
    (tmp_path / "model.bin").write_bytes(b"\x80")
    with pytest.raises(CheckpointError, match=r"model\.bin"):
        write_tokenizer(tmp_path / "model.bin", tmp_path / "out")


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json"])
def test_a_pipe_in_a_file_s_place_is_refused_without_waiting(tmp_path: Path, name: str) -> None:
    os.mkfifo(tmp_path / name)
    with pytest.raises(CheckpointError, match=f"{name} isn't a file"):
        read_json_object(tmp_path / name)
