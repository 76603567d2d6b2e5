"""Perplexity of an engine over a text, by llama-perplexity's method.

The text is tokenised once, without special tokens, and cut into windows of `context` tokens.
Each window runs from an empty cache, and its tokens at positions context // 2 + 1 .. context - 1
are scored.
"""

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from llmbuild.errors import InternalError, RequestError
from llmbuild.runtime.batch import Int32Array, StepBatch
from llmbuild.runtime.executors import Executor
from llmbuild.runtime.manifest import SCRATCH_BLOCK, Manifest
from llmbuild.runtime.threads import choose_num_threads
from llmbuild.runtime.tokenizer import Tokenizer, load_tokenizer

MIN_CONTEXT = 3  # the shortest window with a scored token
ROWS_AT_A_TIME = 32  # of logits widened to float64 together, which bounds the memory


@dataclass(frozen=True, slots=True)
class PerplexityResult:
    """perplexity = exp(mean negative log likelihood) of `num_scored_tokens` tokens."""

    perplexity: float
    num_scored_tokens: int
    context: int  # tokens of a window
    windows: int  # that were run: a short text has fewer than were asked for
    seconds: float


@dataclass(frozen=True, slots=True)
class WindowPart:
    """Tokens `start` .. `stop` - 1 of one window, computed in one step."""

    window: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class WindowSlots:
    """Places in the KV pools for windows that are run together; a window's place is the one
    numbered window % count, free again when the windows `count` before it are done."""

    count: int
    blocks_each: int

    def table(self, window: int) -> range:
        start = SCRATCH_BLOCK + 1 + window % self.count * self.blocks_each
        return range(start, start + self.blocks_each)


def evaluate_engine(
    engine_dir: Path,
    text_path: Path,
    *,
    context: int = 512,
    windows: int = 64,
    num_threads: int | None = None,
) -> PerplexityResult:
    """Open an engine, measure its perplexity over the UTF-8 text in a file, and close it.

    num_threads: by default the processors that this process may use. Raises UserError for what
    can't be used, EngineError for a refused engine.
    """
    from llmbuild.runtime.engine import open_engine
    from llmbuild.runtime.executors.cpu import CpuExecutor

    engine = open_engine(engine_dir)
    manifest, limits = engine.manifest, engine.manifest.limits
    check_context(manifest, context)
    # Windows that one step can hold, the one begun in the step before counted.
    together = min(limits.max_sequences, windows, limits.max_step_tokens // context + 2)
    num_blocks = max(1, together) * _blocks_of_window(manifest, context) + 1
    executor = CpuExecutor(engine, num_blocks, choose_num_threads(num_threads))
    try:
        return perplexity(
            executor,
            load_tokenizer(engine.root),
            manifest,
            num_blocks,
            text_path,
            context=context,
            windows=windows,
        )
    finally:
        executor.close()


def perplexity(
    executor: Executor,
    tokenizer: Tokenizer,
    manifest: Manifest,
    num_blocks: int,
    text_path: Path,
    *,
    context: int = 512,
    windows: int = 64,
) -> PerplexityResult:
    """Perplexity over the first `windows` windows of the UTF-8 text in a file.

    num_blocks: of the executor's KV pools, the scratch block counted; all are overwritten.
    Raises RequestError for a text, context or number of windows that can't be used.
    """
    started_s = time.perf_counter()
    check_context(manifest, context)
    tokens = read_windows(tokenizer, manifest.vocab_size, text_path, context, windows)
    slots = _window_slots(manifest, num_blocks, context)
    total_nll = 0.0
    for parts in plan_steps(tokens.shape, manifest.limits.max_step_tokens, slots.count):
        batch, targets = _build_batch(parts, tokens, slots, manifest.kv.block_size)
        total_nll += sum_nll(executor.step(batch), targets)
    if not math.isfinite(total_nll):
        raise InternalError(f"the sum of negative log likelihoods is {total_nll}")
    num_scored = len(tokens) * (context - 1 - context // 2)
    return PerplexityResult(
        perplexity=math.exp(total_nll / num_scored),
        num_scored_tokens=num_scored,
        context=context,
        windows=len(tokens),
        seconds=time.perf_counter() - started_s,
    )


def check_context(manifest: Manifest, context: int) -> None:
    """Raises RequestError for a window that the engine can't run or that scores nothing."""
    longest = manifest.limits.max_sequence_length
    if not MIN_CONTEXT <= context <= longest:
        raise RequestError(
            f"context is {context} tokens; it must be from {MIN_CONTEXT} to the engine's "
            f"max_sequence_length, {longest}"
        )


def read_windows(
    tokenizer: Tokenizer, vocab_size: int, text_path: Path, context: int, windows: int
) -> Int32Array:
    """The first `windows` whole windows of a text, or as many as it has: [windows, context]."""
    if windows < 1:
        raise RequestError(f"windows is {windows}; it must be at least 1")
    if text_path.exists() and not (text_path.is_file() or text_path.is_dir()):
        raise RequestError(f"{text_path} isn't a file; give a file of UTF-8 text")
    try:
        text = text_path.read_bytes().decode("utf-8")
    except OSError as error:
        raise RequestError(f"{text_path} can't be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise RequestError(f"{text_path} isn't UTF-8 text: byte {error.start} is wrong") from None
    ids = tokenizer.encode(text, with_bos=False)
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


def plan_steps(
    shape: tuple[int, ...], max_step_tokens: int, max_windows: int
) -> Iterator[list[WindowPart]]:
    """Windows in order, packed into steps of at most so many tokens and windows.

    shape: windows and tokens of each. The last token of a window is only predicted, so it isn't
    part of any step.
    """
    num_windows, context = shape
    parts: list[WindowPart] = []
    budget = max_step_tokens
    for window in range(num_windows):
        start = 0
        while start < context - 1:
            stop = min(context - 1, start + budget)
            parts.append(WindowPart(window, start, stop))
            budget -= stop - start
            start = stop
            if budget == 0 or len(parts) == max_windows:
                yield parts
                parts, budget = [], max_step_tokens
    if parts:
        yield parts


def sum_nll(logits: NDArray[np.float32], targets: Int32Array) -> float:
    """Sum of the negative log likelihoods of `targets` [R] under logits [R, vocab], in float64."""
    total = 0.0
    for start in range(0, len(targets), ROWS_AT_A_TIME):
        rows = logits[start : start + ROWS_AT_A_TIME].astype(np.float64)
        own = targets[start : start + ROWS_AT_A_TIME]
        rows -= rows.max(axis=1, keepdims=True)
        chosen = rows[np.arange(len(rows)), own]
        total += float(np.sum(np.log(np.exp(rows).sum(axis=1)) - chosen))
    return total


def _blocks_of_window(manifest: Manifest, context: int) -> int:
    return -(-context // manifest.kv.block_size)


def _window_slots(manifest: Manifest, num_blocks: int, context: int) -> WindowSlots:
    blocks_each = _blocks_of_window(manifest, context)
    count = min(manifest.limits.max_sequences, (num_blocks - 1) // blocks_each)
    if count < 1:
        raise RequestError(
            f"the KV memory has {num_blocks - 1} usable blocks; one window of {context} tokens "
            f"needs {blocks_each}: give more KV memory or a smaller context"
        )
    return WindowSlots(count, blocks_each)


def _build_batch(
    parts: list[WindowPart], tokens: Int32Array, slots: WindowSlots, block_size: int
) -> tuple[StepBatch, Int32Array]:
    """The step's arrays, with logits for scored predictions alone, and the token of each row."""
    first_row = tokens.shape[1] // 2  # position whose logits predict the first scored token
    token_starts = np.cumsum([0, *(part.stop - part.start for part in parts)], dtype=np.int32)
    width = -(-max(part.stop for part in parts) // block_size)
    tables = np.array([slots.table(part.window)[:width] for part in parts], dtype=np.int32)
    rows = [
        np.arange(max(part.start, first_row), part.stop, dtype=np.int32) - part.start + offset
        for part, offset in zip(parts, token_starts, strict=False)
    ]
    batch = StepBatch(
        token_ids=np.concatenate([tokens[p.window, p.start : p.stop] for p in parts]),
        positions=np.concatenate([np.arange(p.start, p.stop, dtype=np.int32) for p in parts]),
        query_start=token_starts,
        kv_lengths=np.array([part.stop for part in parts], dtype=np.int32),
        block_tables=tables,
        logit_rows=np.concatenate(rows),
    )
    targets = [tokens[p.window, max(p.start, first_row) + 1 : p.stop + 1] for p in parts]
    return batch, np.concatenate(targets)
