"""A text's windows, as llama-perplexity cuts them: the text is tokenised once, without special
tokens, and cut into windows of `context` tokens. Each runs from an empty cache, and its tokens at
positions context // 2 + 1 .. context - 1 are scored."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from llmbuild.errors import InternalError, RequestError
from llmbuild.quant.evaluation.defaults import MIN_CONTEXT
from llmbuild.quant.evaluation.steps import KnownSequence, blocks_for
from llmbuild.runtime.batch import Int32Array
from llmbuild.runtime.manifest import SCRATCH_BLOCK, Limits, Manifest
from llmbuild.runtime.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class WindowSlots:
    """Places in the KV pools for windows that are run together; a window's place is the one
    numbered window % count, free again when the windows `count` before it are done. A step must
    hold no more windows than `count`."""

    count: int
    blocks_each: int

    @property
    def num_blocks(self) -> int:
        """Of the KV pools, the scratch block counted."""
        return self.count * self.blocks_each + 1

    def sequences(self, windows: Int32Array) -> list[KnownSequence]:
        """Windows [windows, context], each in its place."""
        first_scored = windows.shape[1] // 2 + 1
        return [
            KnownSequence(tokens, 0, first_scored, self._blocks(index))
            for index, tokens in enumerate(windows)
        ]

    def _blocks(self, window: int) -> range:
        start = SCRATCH_BLOCK + 1 + window % self.count * self.blocks_each
        return range(start, start + self.blocks_each)


def slots_for(limits: Limits, block_size: int, shape: tuple[int, ...]) -> WindowSlots:
    """Places for as many windows as the fullest step holds. shape: windows and tokens of each."""
    windows, context = shape
    # The window begun in the step before and the one that begins as the step ends are counted.
    together = min(limits.max_sequences, windows, limits.max_step_tokens // context + 2)
    return WindowSlots(together, blocks_for(context, block_size))


def read_windows(
    tokenizer: Tokenizer, vocab_size: int, text_path: Path, context: int, windows: int
) -> Int32Array:
    """The first `windows` whole windows of the UTF-8 text in a file, or as many as it has:
    [windows, context]. Raises RequestError for a text or number that can't be used."""
    if windows < 1:
        raise RequestError(f"windows is {windows}; it must be at least 1")
    ids = tokenizer.encode(read_text(text_path), with_bos=False)
    available = len(ids) // context
    if available == 0:
        raise RequestError(
            f"{text_path} has {len(ids)} tokens; one window needs {context}: give a longer text "
            "or a smaller context"
        )
    count = min(windows, available)
    tokens = np.array(ids[: count * context], dtype=np.int32).reshape(count, context)
    if tokens.max() >= vocab_size:
        raise InternalError(f"the tokenizer gave id {tokens.max()} of a vocabulary of {vocab_size}")
    return tokens


def read_text(text_path: Path) -> str:
    """Raises RequestError."""
    if text_path.exists() and not (text_path.is_file() or text_path.is_dir()):
        raise RequestError(f"{text_path} isn't a file; give a file of UTF-8 text")
    try:
        return text_path.read_bytes().decode("utf-8")
    except OSError as error:
        raise RequestError(f"{text_path} can't be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise RequestError(f"{text_path} isn't UTF-8 text: byte {error.start} is wrong") from None


def check_context(manifest: Manifest, context: int) -> None:
    """Raises RequestError for a window that the engine can't run or that scores nothing."""
    longest = manifest.limits.max_sequence_length
    if not MIN_CONTEXT <= context <= longest:
        raise RequestError(
            f"context is {context} tokens; it must be from {MIN_CONTEXT} to the engine's "
            f"max_sequence_length, {longest}"
        )
