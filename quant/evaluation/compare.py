"""How far an engine's predictions are from those of a reference engine of the same model."""

import math
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from llmbuild.errors import InternalError, RequestError
from llmbuild.quant.evaluation.defaults import COMPARE_WINDOWS, CONTEXT
from llmbuild.quant.evaluation.likelihood import log_probabilities, row_chunks, summed_kl
from llmbuild.quant.evaluation.steps import plan_steps, run_step, spans_of
from llmbuild.quant.evaluation.windows import (
    WindowSlots,
    check_context,
    read_windows,
    slots_for,
)
from llmbuild.runtime.batch import Int32Array
from llmbuild.runtime.engine import Engine, open_engine
from llmbuild.runtime.executors import Executor
from llmbuild.runtime.executors.open import open_executor
from llmbuild.runtime.manifest import Limits
from llmbuild.runtime.tokenizer import Tokenizer, load_tokenizer


@dataclass(frozen=True, slots=True)
class CompareResult:
    """Over the scored tokens of the same windows as perplexity has."""

    kl_nats: float  # mean over tokens of KL(reference || engine)
    agreement: float  # share of tokens for which both have the same likeliest token
    perplexity: float
    reference_perplexity: float
    perplexity_ratio: float  # engine / reference
    num_scored_tokens: int
    context: int  # tokens of a window
    windows: int  # that were run: a short text has fewer than were asked for
    seconds: float


@dataclass(slots=True)
class Totals:
    """Sums over scored tokens."""

    kl_nats: float = 0.0
    agreeing: int = 0
    nll: float = 0.0
    reference_nll: float = 0.0
    num_scored: int = 0

    def add(
        self,
        logits: NDArray[np.float32],
        reference_logits: NDArray[np.float32],
        targets: Int32Array,
    ) -> None:
        """Both logits [R, vocab], and the token [R] that follows."""
        for chunk in row_chunks(len(targets)):
            ours = log_probabilities(logits[chunk])
            theirs = log_probabilities(reference_logits[chunk])
            own = np.arange(len(ours)), targets[chunk]
            self.kl_nats += summed_kl(theirs, ours)
            self.agreeing += int((ours.argmax(axis=1) == theirs.argmax(axis=1)).sum())
            self.nll -= float(ours[own].sum())
            self.reference_nll -= float(theirs[own].sum())
            self.num_scored += len(ours)


@dataclass(frozen=True, slots=True)
class Contestant:
    """An engine that runs, and its places for windows."""

    executor: Executor
    block_size: int
    slots: WindowSlots


def compare_engines(
    engine_dir: Path,
    reference_dir: Path,
    text_path: Path,
    *,
    context: int = CONTEXT,
    windows: int = COMPARE_WINDOWS,
    num_threads: int | None = None,
) -> CompareResult:
    """Open both engines, run both over the windows of the UTF-8 text in a file, and close them.

    num_threads: of each rank, by default the processors that it may use. Raises UserError for what
    can't be used or compared, EngineError for a refused engine.
    """
    started_s = time.perf_counter()
    engine, reference = open_engine(engine_dir), open_engine(reference_dir)
    check_context(engine.manifest, context)
    check_context(reference.manifest, context)
    tokens = _same_windows(engine, reference, text_path, context, windows)
    limits = _common_limits(engine.manifest.limits, reference.manifest.limits)
    with ExitStack() as opened:
        ours, theirs = (
            _contestant(each, limits, tokens.shape, num_threads, opened)
            for each in (engine, reference)
        )
        totals = compare(ours, theirs, limits.max_step_tokens, tokens)
    return _result(totals, tokens.shape, time.perf_counter() - started_s)


def compare(
    engine: Contestant, reference: Contestant, max_step_tokens: int, windows: Int32Array
) -> Totals:
    """Run both through the same steps over windows [windows, context], step by step, so that the
    logits of one step alone are held."""
    totals = Totals()
    both = [(each, each.slots.sequences(windows)) for each in (engine, reference)]
    max_windows = min(engine.slots.count, reference.slots.count)
    for parts in plan_steps(spans_of(both[0][1]), max_step_tokens, max_windows):
        ours, theirs = (
            run_step(each.executor, each.block_size, sequences, parts) for each, sequences in both
        )
        totals.add(ours.logits, theirs.logits, ours.targets)
    return totals


def check_same_vocabulary(
    engine: Tokenizer, reference: Tokenizer, vocab_size: int, reference_vocab_size: int
) -> None:
    """Raises RequestError unless each id stands for the same text in both."""
    if vocab_size != reference_vocab_size:
        raise RequestError(
            f"the engine has a vocabulary of {vocab_size} tokens and the reference one of "
            f"{reference_vocab_size}; compare engines of the same model"
        )
    for token_id in range(vocab_size):
        ours, theirs = engine.pieces[token_id], reference.pieces[token_id]
        if ours != theirs:
            raise RequestError(
                f"token {token_id} is {ours.text!r} to the engine and {theirs.text!r} to the "
                "reference; compare engines of the same model"
            )


def _same_windows(
    engine: Engine, reference: Engine, text_path: Path, context: int, windows: int
) -> Int32Array:
    """The text's windows, which must be the same for both."""
    tokenizer, other = load_tokenizer(engine.root), load_tokenizer(reference.root)
    vocab_size = engine.manifest.vocab_size
    check_same_vocabulary(tokenizer, other, vocab_size, reference.manifest.vocab_size)
    ours = read_windows(tokenizer, vocab_size, text_path, context, windows)
    theirs = read_windows(other, vocab_size, text_path, context, windows)
    if not np.array_equal(ours, theirs):
        raise RequestError(
            f"{text_path} has other tokens for the engine than for the reference; compare engines "
            "with the same tokenizer"
        )
    return ours


def _contestant(
    engine: Engine,
    limits: Limits,
    shape: tuple[int, ...],
    num_threads: int | None,
    opened: ExitStack,
) -> Contestant:
    """Loads the engine; closed with `opened`. shape: windows and tokens of each."""
    block_size = engine.manifest.kv.block_size
    slots = slots_for(limits, block_size, shape)
    executor = open_executor(engine, slots.num_blocks, num_threads, pin_threads=False)
    opened.callback(executor.close)
    return Contestant(executor, block_size, slots)


def _common_limits(a: Limits, b: Limits) -> Limits:
    return Limits(
        max_sequence_length=min(a.max_sequence_length, b.max_sequence_length),
        max_step_tokens=min(a.max_step_tokens, b.max_step_tokens),
        max_sequences=min(a.max_sequences, b.max_sequences),
    )


def _result(totals: Totals, shape: tuple[int, ...], seconds: float) -> CompareResult:
    sums = (totals.kl_nats, totals.nll, totals.reference_nll)
    if not all(map(math.isfinite, sums)):
        raise InternalError(f"the sums of KL and negative log likelihoods are {sums}")
    kl_nats, nll, reference_nll = (total / totals.num_scored for total in sums)
    return CompareResult(
        kl_nats=kl_nats,
        agreement=totals.agreeing / totals.num_scored,
        perplexity=math.exp(nll),
        reference_perplexity=math.exp(reference_nll),
        perplexity_ratio=math.exp(nll - reference_nll),
        num_scored_tokens=totals.num_scored,
        context=shape[1],
        windows=shape[0],
        seconds=seconds,
    )
