"""Writes a checkpoint's tokenizer as an engine carries it."""

import json
from pathlib import Path

from tokenizers import Tokenizer

from llmbuild.builder.checkpoint.base import TokenizerFiles
from llmbuild.builder.checkpoint.gguf_file import is_gguf
from llmbuild.builder.checkpoint.gguf_tokenizer import read_gguf_tokenizer
from llmbuild.builder.checkpoint.hf_tokenizer import read_hf_tokenizer
from llmbuild.errors import CheckpointError


def write_tokenizer(path: Path, out: Path) -> list[str]:
    """Writes the tokenizer of the checkpoint at `path` into directory `out`.

    Files: tokenizer.json; generation_config.json with bos_token_id (or null), eos_token_id (a
    list) and add_bos, whether a prompt starts with BOS; chat_template.jinja if there is one.
    Returns the names written. All is read and checked before anything is written; raises
    CheckpointError.
    """
    if path.is_dir():
        files = read_hf_tokenizer(path)
    elif is_gguf(path):
        files = read_gguf_tokenizer(path)
    else:
        raise CheckpointError(f"{path} has no tokenizer; give a model directory or a GGUF file")
    _check_ids(path, files)
    generation = {
        "bos_token_id": files.bos_token_id,
        "eos_token_id": list(files.eos_token_ids),
        "add_bos": files.add_bos,
    }
    contents = {
        "tokenizer.json": files.tokenizer_json,
        "generation_config.json": json.dumps(generation, indent=2) + "\n",
    }
    if files.chat_template is not None:
        contents["chat_template.jinja"] = files.chat_template
    out.mkdir(parents=True, exist_ok=True)
    for name, text in contents.items():
        (out / name).write_text(text, encoding="utf-8", newline="")
    return list(contents)


def _check_ids(path: Path, files: TokenizerFiles) -> None:
    """Every special id is a token: the runtime looks up their texts."""
    tokenizer = Tokenizer.from_str(files.tokenizer_json)
    bos = [] if files.bos_token_id is None else [files.bos_token_id]
    unknown = [i for i in (*bos, *files.eos_token_ids) if tokenizer.id_to_token(i) is None]
    if unknown:
        raise CheckpointError(
            f"{path}: BOS or EOS ids {unknown} aren't tokens of the tokenizer, which has "
            f"{tokenizer.get_vocab_size()}"
        )
    if files.add_bos and not bos:
        raise CheckpointError(f"{path}: prompts are to start with BOS, but no BOS token is named")
