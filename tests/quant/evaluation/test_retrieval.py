"""Texts with facts, and whether what an engine is credited with is what it would generate."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from llmbuild.errors import InternalError, RequestError
from llmbuild.quant.evaluation.facts import FACTS_TOGETHER, FactText, Question, make_text
from llmbuild.quant.evaluation.retrieval import (
    Answered,
    RetrievalResult,
    answer,
    lay_out,
    make_texts,
    measure_retrieval,
    summed,
)
from llmbuild.runtime.manifest import Manifest
from llmbuild.runtime.tokenizer import Tokenizer

CONTEXT = 600  # bytes


def encode(text: str) -> list[int]:
    return list(text.encode())


@given(st.integers(520, 3000), st.text(max_size=9))
@settings(max_examples=30)
def test_text_and_any_question_fill_the_context_but_for_a_sentence(context: int, seed: str) -> None:
    text = make_text(encode, context, seed, bos=[0, 1])
    longest = max(len(q.stem) + len(q.answer) for q in text.questions)
    assert context - 200 < len(text.tokens) + longest <= context
    assert text.tokens[:2] == [0, 1]
    words = bytes(text.tokens[2:]).decode()
    assert len({bytes(q.stem) for q in text.questions}) == 2 * FACTS_TOGETHER
    places: dict[str, list[int]] = {"start": [], "middle": []}  # where facts begin and end
    for question in text.questions:
        fact = bytes(question.stem + question.answer).decode() + "."
        assert words.count(fact) == 1
        places[question.place] += [words.index(fact), words.index(fact) + len(fact)]
        assert question.answer[0] == ord(" ")
        assert 10_000 <= int(bytes(question.answer)) <= 99_999
    assert min(places["start"]) == 0
    before = min(places["middle"]) - max(places["start"])
    after = len(words) - max(places["middle"])
    assert abs(before - after) < 200  # two sentences


def test_texts_of_a_seed_are_the_same_and_of_others_are_not(tokenizer: Tokenizer) -> None:
    texts = make_texts(tokenizer, CONTEXT, 7, seed=3)
    assert texts == make_texts(tokenizer, CONTEXT, 7, seed=3)
    assert texts[0] == make_texts(tokenizer, CONTEXT, 99, seed=3)[0]
    assert texts[0].tokens != texts[1].tokens
    assert texts[0].tokens != make_texts(tokenizer, CONTEXT, 7, seed=4)[0].tokens


@pytest.mark.parametrize("samples", [1, 5, 7, 10])
def test_as_many_facts_are_asked_for_in_each_place_as_are_wanted(
    tokenizer: Tokenizer, samples: int
) -> None:
    texts = make_texts(tokenizer, CONTEXT, samples, seed=0)
    places = [question.place for text in texts for question in text.questions]
    assert (places.count("start"), places.count("middle")) == (samples, samples)
    assert all(text.tokens[0] == 0 for text in texts)  # BOS
    assert all(text.questions for text in texts)


def test_context_that_does_not_hold_the_facts_is_refused() -> None:
    with pytest.raises(RequestError, match=r"context of 99 tokens is too short: .* take \d{3}"):
        make_text(encode, 99, "0", bos=[])


@given(st.integers(1, 300), st.integers(1, 40))
def test_questions_share_whole_blocks_of_the_text_and_nothing_else(
    num_tokens: int, block_size: int
) -> None:
    questions = [Question("start", [1] * 5, [2, 3]), Question("middle", [4], [5] * 9)]
    laid = lay_out(FactText(list(range(num_tokens)), questions), block_size)
    shared = num_tokens // block_size
    own = [sequence.blocks[shared:] for sequence in laid.questions]
    assert all(list(s.blocks[:shared]) == list(laid.text.blocks) for s in laid.questions)
    used = [*laid.text.blocks, *own[0], *own[1]]
    assert sorted(used) == list(range(1, laid.num_blocks))
    for sequence, blocks in zip(laid.questions, own, strict=True):
        assert sequence.start == shared * block_size == len(laid.text.tokens) - 1
        assert (shared + len(blocks)) * block_size >= len(sequence.tokens)


@pytest.mark.parametrize("block_size", [1, 4, 16, 256])
@pytest.mark.parametrize("max_step_tokens", [3, 64, 4096])
def test_found_is_what_greedy_decoding_of_each_prompt_alone_gives(
    tokenizer: Tokenizer,
    make_manifest: Callable[..., Manifest],
    history_executor: Callable[..., Any],
    block_size: int,
    max_step_tokens: int,
) -> None:
    """The model copies what followed the last nine bytes where they stood before; some histories,
    by a checksum, confuse it."""
    [text] = make_texts(tokenizer, CONTEXT, 5, seed=1)
    manifest = make_manifest(
        block_size=block_size, max_step_tokens=max_step_tokens, max_sequence_length=CONTEXT
    )

    def predict(history: list[int]) -> NDArray[np.float32]:
        logits = np.zeros(256, np.float32)
        rest, end = history[:-1], history[-9:]
        starts = [i for i in range(len(rest) - 8) if rest[i : i + 9] == end]
        logits[history[starts[0] + 9] if starts else 7] = 9
        if sum(history) % 11 == 0:
            logits[0] = 10
        return logits

    executor = history_executor(manifest, lay_out(text, block_size).num_blocks, predict)
    answered = answer(executor, manifest, text)
    for index, question in enumerate(text.questions):
        history = text.tokens + question.stem
        for _ in question.answer:
            history = [*history, int(predict(history).argmax())]
        assert answered.found[index] == (history[-len(question.answer) :] == question.answer)
        expected = 0.0
        for given_tokens in range(len(question.answer)):
            prompt = text.tokens + question.stem + question.answer[:given_tokens]
            logits = predict(prompt).astype(np.float64)
            expected += logits[question.answer[given_tokens]] - np.log(np.exp(logits).sum())
        assert answered.log_probabilities[index] == pytest.approx(expected, rel=1e-12)
    assert 0 < answered.found.sum() < len(text.questions)
    asked = sum(len(q.stem) + len(q.answer) for q in text.questions)
    assert executor.num_tokens <= len(text.tokens) + asked + 10 * (block_size - 1)


def test_figures_of_a_place_count_its_own_questions_and_all_their_tokens() -> None:
    def answered(*found: bool) -> Answered:
        questions = [Question("start", [1], [1, 2, 3]), Question("middle", [1], [1] * 7)]
        return Answered(questions, np.array(found), np.array([-6.0, -70.0]))

    row = summed(99, "start", [answered(True, False), answered(False, False)])
    assert (row.context, row.place, row.samples) == (99, "start", 2)
    assert (row.accuracy, row.log_probability) == (0.5, -2.0)


def test_logits_that_are_not_a_number_are_our_fault(
    tokenizer: Tokenizer,
    make_manifest: Callable[..., Manifest],
    history_executor: Callable[..., Any],
) -> None:
    [text] = make_texts(tokenizer, CONTEXT, 1, seed=1)
    manifest = make_manifest(max_sequence_length=CONTEXT)
    executor = history_executor(
        manifest, lay_out(text, 4).num_blocks, lambda history: np.full(256, np.nan, np.float32)
    )
    with pytest.raises(InternalError, match="nan"):
        answer(executor, manifest, text)


@pytest.fixture(scope="module")
def long_engine(
    tmp_path_factory: pytest.TempPathFactory,
    save_tiny_llama: Callable[..., Path],
    run_llmbuild: Callable[..., Any],
) -> Path:
    folder = tmp_path_factory.mktemp("long")
    recipe = save_tiny_llama(folder, max_position_embeddings=CONTEXT)
    done = run_llmbuild("compile", recipe, "-o", folder / "engine")
    assert done.returncode == 0, done.stderr
    return folder / "engine"


def test_engine_is_asked_at_contexts_that_it_can_run(long_engine: Path) -> None:
    result = measure_retrieval(long_engine, samples=2, num_threads=1)
    assert [(row.context, row.place, row.samples) for row in result.rows] == [
        (512, "start", 2),
        (512, "middle", 2),
    ]
    assert result.accuracy == 0  # of a random model
    assert -20 < result.log_probability < -2
    assert result.log_probability == pytest.approx(
        sum(row.log_probability for row in result.rows) / 2  # six bytes an answer
    )
    again = measure_retrieval(long_engine, contexts=[512], samples=2, num_threads=2)
    assert again.rows == result.rows


def test_command_prints_a_line_a_place_and_with_json_one_object(
    long_engine: Path, run_llmbuild: Callable[..., Any]
) -> None:
    asked = ("eval", "retrieval", long_engine, "--contexts", "512,600", "--samples", 1)
    lines = run_llmbuild(*asked).stdout.splitlines()
    assert [line.split()[:3] for line in lines[:-1]] == [
        ["context", f"{length},", place]
        for length in ("512", "600")
        for place in ("start", "middle")
    ]
    assert lines[-1].startswith("accuracy 0.00%, log probability -")
    [line] = run_llmbuild(*asked, "--seed", 5, "--json").stdout.splitlines()
    result = msgspec.json.decode(line, type=RetrievalResult)
    assert (result.seed, len(result.rows), result.accuracy_at(600)) == (5, 4, 0.0)
    refused = run_llmbuild(*asked[:4], "512,long")
    assert refused.returncode == 2
    assert "'512,long' isn't a list of whole numbers such as 512,2048" in refused.stderr


@pytest.mark.parametrize(
    ("contexts", "samples", "named"),
    [
        ([CONTEXT + 1], 1, r"contexts is 601; .* max_sequence_length, 600"),
        ([540, 540], 1, "contexts is 540, 540; it must be distinct"),
        ([], 1, "contexts is empty"),
        ([540], 0, "samples is 0"),
        ([99], 1, "context of 99 tokens is too short"),
    ],
)
def test_what_can_not_be_asked_is_refused(
    long_engine: Path, contexts: list[int], samples: int, named: str
) -> None:
    with pytest.raises(RequestError, match=named):
        measure_retrieval(long_engine, contexts=contexts, samples=samples, num_threads=1)
