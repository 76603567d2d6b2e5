"""Perplexity against a plain loop over whole windows, with a model that sees its KV content."""

import math
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from llmbuild.errors import InternalError
from llmbuild.quant.evaluation import perplexity as module
from llmbuild.quant.evaluation.perplexity import PerplexityResult, measure_perplexity, perplexity
from llmbuild.quant.evaluation.windows import read_windows, slots_for
from llmbuild.runtime.manifest import Manifest
from llmbuild.runtime.tokenizer import Tokenizer


@pytest.fixture
def measured(
    tokenizer: Tokenizer, text_path: Path, history_executor: Callable[..., Any]
) -> Callable[..., tuple[PerplexityResult, Any]]:
    """measured(manifest, context, windows): the result, and the executor that it ran on."""

    def measure(manifest: Manifest, context: int, windows: int) -> tuple[PerplexityResult, Any]:
        tokens = read_windows(tokenizer, manifest.vocab_size, text_path, context, windows)
        slots = slots_for(manifest.limits, manifest.kv.block_size, tokens.shape)
        executor = history_executor(manifest, slots.num_blocks)
        return perplexity(executor, manifest, slots, tokens), executor

    return measure


def reference(
    ids: list[int], context: int, windows: int, predict: Callable[..., Any]
) -> tuple[float, int]:
    """Perplexity by the definition, one window and one position after the other."""
    nll = []
    for window in range(min(windows, len(ids) // context)):
        tokens = ids[window * context : (window + 1) * context]
        for position in range(context // 2 + 1, context):
            logits = [float(x) for x in predict(tokens[:position])]
            top = max(logits)
            total = math.fsum(math.exp(x - top) for x in logits)
            nll.append(math.log(total) + top - logits[tokens[position]])
    return math.exp(math.fsum(nll) / len(nll)), len(nll)


@pytest.mark.parametrize("context", [3, 4, 13, 16, 31])
@pytest.mark.parametrize(
    ("max_step_tokens", "max_sequences", "block_size"),
    [(40, 3, 4), (1, 1, 4), (7, 2, 1), (200, 5, 16), (29, 4, 5)],
)
def test_perplexity_equals_its_definition(
    tokenizer: Tokenizer,
    text_path: Path,
    make_manifest: Callable[..., Manifest],
    measured: Callable[..., tuple[PerplexityResult, Any]],
    predict: Callable[..., Any],
    context: int,
    max_step_tokens: int,
    max_sequences: int,
    block_size: int,
) -> None:
    manifest = make_manifest(
        max_step_tokens=max_step_tokens, max_sequences=max_sequences, block_size=block_size
    )
    result, executor = measured(manifest, context, 5)
    ids = tokenizer.encode(text_path.read_text(encoding="utf-8"), with_bos=False)
    expected, num_scored = reference(ids, context, 5, predict)
    assert result.perplexity == pytest.approx(expected, rel=1e-12)
    assert result.num_scored_tokens == num_scored == executor.num_rows
    assert (result.context, result.windows) == (context, 5)
    assert result.seconds > 0


def test_window_of_512_scores_255_tokens_in_one_step(
    tokenizer: Tokenizer,
    text_path: Path,
    make_manifest: Callable[..., Manifest],
    measured: Callable[..., tuple[PerplexityResult, Any]],
) -> None:
    text_path.write_text("abcdefg" * 80)
    manifest = make_manifest(max_sequence_length=512, max_step_tokens=512)
    result, executor = measured(manifest, 512, 1)
    assert result.num_scored_tokens == 255
    assert executor.num_steps == 1


def test_logits_that_are_not_a_number_are_our_fault(
    tokenizer: Tokenizer,
    text_path: Path,
    make_manifest: Callable[..., Manifest],
    history_executor: Callable[..., Any],
) -> None:
    manifest = make_manifest()
    tokens = read_windows(tokenizer, manifest.vocab_size, text_path, 9, 1)
    slots = slots_for(manifest.limits, manifest.kv.block_size, tokens.shape)
    executor = history_executor(
        manifest, slots.num_blocks, lambda history: np.full(256, math.nan, np.float32)
    )
    with pytest.raises(InternalError, match="nan"):
        perplexity(executor, manifest, slots, tokens)


def test_engine_is_opened_with_the_blocks_and_threads_that_are_needed_and_closed(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    tokenizer: Tokenizer,
    text_path: Path,
    make_manifest: Callable[..., Manifest],
    history_executor: Callable[..., Any],
) -> None:
    manifest = make_manifest(max_step_tokens=29, max_sequences=9)
    made = []

    def open_executor(engine: Any, num_blocks: int, num_threads: int, *, pin_threads: bool) -> Any:
        executor = history_executor(manifest, num_blocks)
        executor.close = lambda: made.append("closed")
        made.append((num_blocks, num_threads, pin_threads))
        return executor

    engine = SimpleNamespace(root=tmp_path, manifest=manifest)
    monkeypatch.setattr(module, "open_engine", lambda root: engine)
    monkeypatch.setattr(module, "load_tokenizer", lambda root: tokenizer)
    monkeypatch.setattr(module, "open_executor", open_executor)
    result = measure_perplexity(tmp_path, text_path, context=13, windows=9, num_threads=2)
    assert made == [(4 * 4 + 1, 2, False), "closed"]
    assert result.windows == 9
