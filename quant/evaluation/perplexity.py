"""Perplexity of an engine over a text's windows, by llama-perplexity's method."""

import math
import time
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from llmbuild.errors import InternalError
from llmbuild.quant.evaluation.defaults import CONTEXT, PERPLEXITY_WINDOWS
from llmbuild.quant.evaluation.likelihood import target_log_probabilities
from llmbuild.quant.evaluation.steps import plan_steps, run_step, spans_of
from llmbuild.quant.evaluation.windows import (
    WindowSlots,
    check_context,
    read_windows,
    slots_for,
)
from llmbuild.runtime.batch import Int32Array
from llmbuild.runtime.engine import open_engine
from llmbuild.runtime.executors import Executor
from llmbuild.runtime.executors.open import open_executor
from llmbuild.runtime.manifest import Manifest
from llmbuild.runtime.tokenizer import load_tokenizer


@dataclass(frozen=True, slots=True)
class PerplexityResult:
    """perplexity = exp(mean negative log likelihood) of `num_scored_tokens` tokens."""

    perplexity: float
    num_scored_tokens: int
    context: int  # tokens of a window
    windows: int  # that were run: a short text has fewer than were asked for
    seconds: float


def measure_perplexity(
    engine_dir: Path,
    text_path: Path,
    *,
    context: int = CONTEXT,
    windows: int = PERPLEXITY_WINDOWS,
    num_threads: int | None = None,
) -> PerplexityResult:
    """Open an engine, measure its perplexity over the first `windows` windows of the UTF-8 text
    in a file, and close it.

    num_threads: of each rank, by default the processors that it may use. Raises UserError for what
    can't be used, EngineError for a refused engine.
    """
    engine = open_engine(engine_dir)
    manifest = engine.manifest
    check_context(manifest, context)
    tokenizer = load_tokenizer(engine.root)
    tokens = read_windows(tokenizer, manifest.vocab_size, text_path, context, windows)
    slots = slots_for(manifest.limits, manifest.kv.block_size, tokens.shape)
    executor = open_executor(engine, slots.num_blocks, num_threads, pin_threads=False)
    with closing(executor):
        return perplexity(executor, manifest, slots, tokens)


def perplexity(
    executor: Executor, manifest: Manifest, slots: WindowSlots, windows: Int32Array
) -> PerplexityResult:
    """Perplexity over windows of tokens [windows, context], which take `slots` of the executor's
    KV pools."""
    started_s = time.perf_counter()
    sequences = slots.sequences(windows)
    total_nll, num_scored = 0.0, 0
    for parts in plan_steps(spans_of(sequences), manifest.limits.max_step_tokens, slots.count):
        rows = run_step(executor, manifest.kv.block_size, sequences, parts)
        total_nll -= float(target_log_probabilities(rows.logits, rows.targets).sum())
        num_scored += len(rows.targets)
    if not math.isfinite(total_nll):
        raise InternalError(f"the sum of negative log likelihoods is {total_nll}")
    return PerplexityResult(
        perplexity=math.exp(total_nll / num_scored),
        num_scored_tokens=num_scored,
        context=windows.shape[1],
        windows=len(windows),
        seconds=time.perf_counter() - started_s,
    )
