"""Lazy checkpoint readers: Hugging Face directories of safetensors, and GGUF files."""

from pathlib import Path

from llmbuild.builder.checkpoint.base import Checkpoint, TensorInfo
from llmbuild.builder.checkpoint.gguf import GgufCheckpoint
from llmbuild.builder.checkpoint.gguf_file import is_gguf
from llmbuild.builder.checkpoint.hugging_face import open_hugging_face
from llmbuild.builder.checkpoint.safetensors import refuse_pickle
from llmbuild.errors import CheckpointError

__all__ = ["Checkpoint", "TensorInfo", "open_checkpoint"]


def open_checkpoint(path: Path) -> Checkpoint:
    """Opens a Hugging Face directory or a GGUF file and checks its structure; no tensor is read.

    Raises CheckpointError for anything else, and for files that are damaged or not supported.
    """
    try:
        if path.is_dir():
            return open_hugging_face(path)
        if is_gguf(path):
            return GgufCheckpoint(path)
    except OSError as error:  # a directory that can't be looked into
        raise CheckpointError(f"{path} can't be read: {error}") from error
    refuse_pickle(path)
    raise CheckpointError(
        f"{path} isn't a checkpoint; give a directory with config.json and safetensors files, "
        "or a .gguf file"
    )
