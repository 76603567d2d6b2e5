"""Does an engine find facts again that stand at the start and in the middle of long contexts?

Quantising the KV cache can cost this unnoticed, as perplexity is mostly a matter of the nearest
tokens. An answer is right if each of its tokens is the likeliest after the ones before it: exactly
when greedy decoding gives it.
"""

import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from llmbuild.errors import InternalError, RequestError
from llmbuild.quant.evaluation.defaults import RETRIEVAL_SAMPLES, default_contexts
from llmbuild.quant.evaluation.facts import (
    FACTS_TOGETHER,
    PLACES,
    FactText,
    Place,
    Question,
    make_text,
)
from llmbuild.quant.evaluation.likelihood import target_log_probabilities
from llmbuild.quant.evaluation.steps import KnownSequence, blocks_for, run
from llmbuild.runtime.engine import open_engine
from llmbuild.runtime.executors import Executor
from llmbuild.runtime.executors.open import open_executor
from llmbuild.runtime.manifest import SCRATCH_BLOCK, Manifest
from llmbuild.runtime.tokenizer import Tokenizer, load_tokenizer


@dataclass(frozen=True, slots=True)
class Retrieved:
    """What was found again of the facts in one place of contexts of one length."""

    context: int  # tokens at most of text, question and answer
    place: Place
    samples: int  # facts asked for
    accuracy: float  # share of them that was found
    log_probability: float  # mean of the answers' tokens, natural


@dataclass(frozen=True, slots=True)
class RetrievalResult:
    accuracy: float  # over all that was asked, as is log_probability
    log_probability: float
    rows: list[Retrieved]
    seed: int
    seconds: float

    def accuracy_at(self, context: int) -> float:
        """Over both places."""
        rows = [row for row in self.rows if row.context == context]
        return sum(row.accuracy * row.samples for row in rows) / sum(row.samples for row in rows)


@dataclass(frozen=True, slots=True)
class Laid:
    """A text and its questions in KV blocks: each question shares the whole blocks of the text
    and has the rest of it, and itself, in blocks of its own."""

    text: KnownSequence
    questions: list[KnownSequence]
    num_blocks: int  # of the pools, the scratch block counted


@dataclass(frozen=True, slots=True)
class Answered:
    """found: whether each question's answer is right. log_probabilities: its tokens', summed."""

    questions: list[Question]
    found: NDArray[np.bool_]
    log_probabilities: NDArray[np.float64]


def measure_retrieval(
    engine_dir: Path,
    *,
    contexts: Sequence[int] | None = None,
    samples: int = RETRIEVAL_SAMPLES,
    seed: int = 0,
    num_threads: int | None = None,
) -> RetrievalResult:
    """Open an engine, ask it for `samples` facts in each place of each context, and close it.

    contexts: tokens; by default those of RETRIEVAL_CONTEXTS that the engine can run. num_threads:
    by default the processors that this process may use. Raises UserError for what can't be used,
    EngineError for a refused engine.
    """
    started_s = time.perf_counter()
    engine = open_engine(engine_dir)
    manifest = engine.manifest
    contexts = _usable_contexts(contexts, manifest.limits.max_sequence_length)
    if samples < 1:
        raise RequestError(f"samples is {samples}; it must be at least 1")
    tokenizer = load_tokenizer(engine.root)
    texts = {context: make_texts(tokenizer, context, samples, seed) for context in contexts}
    block_size = manifest.kv.block_size
    num_blocks = max(lay_out(t, block_size).num_blocks for each in texts.values() for t in each)
    with closing(open_executor(engine, num_blocks, num_threads, pin_threads=False)) as executor:
        answered = {
            context: [answer(executor, manifest, text) for text in texts[context]]
            for context in contexts
        }
    rows = [summed(context, place, answered[context]) for context in contexts for place in PLACES]
    everything = [each for of_context in answered.values() for each in of_context]
    return RetrievalResult(
        *_means(everything, PLACES), rows, seed=seed, seconds=time.perf_counter() - started_s
    )


def make_texts(tokenizer: Tokenizer, context: int, samples: int, seed: int) -> list[FactText]:
    """Texts that have `samples` questions in each place together. What a text says depends on the
    seed, its context and its number alone."""

    def encode(text: str) -> list[int]:
        return tokenizer.encode(text, with_bos=False)

    bos = tokenizer.encode("")  # BOS alone where the model wants one
    texts = []
    for start in range(0, samples, FACTS_TOGETHER):
        text = make_text(encode, context, f"{seed} {context} {start}", bos)
        asked = [
            question
            for place in PLACES
            for question in [q for q in text.questions if q.place == place][: samples - start]
        ]
        texts.append(FactText(text.tokens, asked))
    return texts


def lay_out(text: FactText, block_size: int) -> Laid:
    num_shared_blocks = len(text.tokens) // block_size
    num_shared = num_shared_blocks * block_size
    free = SCRATCH_BLOCK + 1 + num_shared_blocks
    shared_blocks = range(SCRATCH_BLOCK + 1, free)
    questions = []
    for question in text.questions:
        tokens = np.array(text.tokens + question.stem + question.answer, np.int32)
        own = blocks_for(len(tokens), block_size) - num_shared_blocks
        blocks = [*shared_blocks, *range(free, free + own)]
        free += own
        first_scored = len(tokens) - len(question.answer)
        questions.append(KnownSequence(tokens, num_shared, first_scored, blocks))
    tokens = questions[0].tokens[: num_shared + 1]
    return Laid(KnownSequence(tokens, 0, len(tokens), shared_blocks), questions, free)


def answer(executor: Executor, manifest: Manifest, text: FactText) -> Answered:
    """Read the text once, and then the questions, all of them after the same text."""
    limits, block_size = manifest.limits, manifest.kv.block_size
    laid = lay_out(text, block_size)
    for _ in run(executor, limits, block_size, [laid.text]):
        pass
    found = np.ones(len(laid.questions), dtype=np.bool_)
    log_probabilities = np.zeros(len(laid.questions))
    for rows in run(executor, limits, block_size, laid.questions):
        is_likeliest = rows.logits.argmax(axis=1) == rows.targets
        np.logical_and.at(found, rows.owners, is_likeliest)
        own = target_log_probabilities(rows.logits, rows.targets)
        np.add.at(log_probabilities, rows.owners, own)
    if not np.isfinite(log_probabilities).all():
        raise InternalError(f"log probabilities of answers are {log_probabilities}")
    return Answered(text.questions, found, log_probabilities)


def summed(context: int, place: Place, answered: list[Answered]) -> Retrieved:
    samples = sum(question.place == place for each in answered for question in each.questions)
    return Retrieved(context, place, samples, *_means(answered, [place]))


def _means(answered: list[Answered], places: Sequence[Place]) -> tuple[float, float]:
    """Accuracy, and the log probability of an answer's token, in some places."""
    asked = [
        (found, log_probability, len(question.answer))
        for each in answered
        for question, found, log_probability in zip(
            each.questions, each.found.tolist(), each.log_probabilities.tolist(), strict=True
        )
        if question.place in places
    ]
    found, log_probabilities, num_tokens = (sum(values) for values in zip(*asked, strict=True))
    return found / len(asked), log_probabilities / num_tokens


def _usable_contexts(contexts: Sequence[int] | None, longest: int) -> Sequence[int]:
    if contexts is None:
        return default_contexts(longest)
    if not contexts or max(contexts) > longest or len(set(contexts)) < len(contexts):
        raise RequestError(
            f"contexts is {', '.join(map(str, contexts)) or 'empty'}; it must be distinct lengths "
            f"up to the engine's max_sequence_length, {longest}"
        )
    return contexts
