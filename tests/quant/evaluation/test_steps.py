"""Known sequences in steps: what is computed, where it lies, and which token each row predicts."""

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from llmbuild.quant.evaluation.likelihood import log_probabilities, target_log_probabilities
from llmbuild.quant.evaluation.steps import KnownSequence, Part, plan_steps, run
from llmbuild.runtime.manifest import Manifest


@st.composite
def spans(draw: st.DrawFn) -> list[tuple[int, int]]:
    starts = draw(st.lists(st.integers(0, 9), max_size=9))
    return [(start, start + draw(st.integers(0, 40))) for start in starts]


@given(spans(), st.integers(1, 30), st.integers(1, 5))
def test_every_token_is_computed_once_in_order_within_the_limits(
    of_sequences: list[tuple[int, int]], max_step_tokens: int, max_sequences: int
) -> None:
    steps = list(plan_steps(of_sequences, max_step_tokens, max_sequences))
    computed = [(p.sequence, t) for parts in steps for p in parts for t in range(p.start, p.stop)]
    assert computed == [(i, t) for i, span in enumerate(of_sequences) for t in range(*span)]
    for parts in steps:
        assert 1 <= sum(part.stop - part.start for part in parts) <= max_step_tokens
        assert len({part.sequence for part in parts}) == len(parts) <= max_sequences


def test_sequences_share_steps() -> None:
    assert list(plan_steps([(0, 10), (4, 14), (0, 10)], max_step_tokens=20, max_sequences=4)) == [
        [Part(0, 0, 10), Part(1, 4, 14)],
        [Part(2, 0, 10)],
    ]


@pytest.mark.parametrize("max_step_tokens", [1, 5, 7, 100])
def test_rows_are_the_scored_predictions_after_their_own_history(
    make_manifest: Callable[..., Manifest],
    history_executor: Callable[..., object],
    predict: Callable[..., NDArray[np.float32]],
    max_step_tokens: int,
) -> None:
    """One scored from its second token on, one whose first seven tokens the one before computed,
    one that isn't scored, and one of which only the last token is."""
    manifest = make_manifest(max_step_tokens=max_step_tokens)
    executor = history_executor(manifest, num_blocks=20)
    tokens = [np.arange(13, dtype=np.int32), np.arange(11, dtype=np.int32) % 8]
    tokens += [np.arange(50, 59, dtype=np.int32), np.arange(70, 75, dtype=np.int32)]
    sequences = [
        KnownSequence(tokens[0], 0, 1, range(1, 5)),
        KnownSequence(tokens[1], 4, 8, [1, 6, 7]),
        KnownSequence(tokens[2], 0, 9, [8, 9, 10]),
        KnownSequence(tokens[3], 0, 4, [12, 11]),
    ]
    found = [
        (int(owner), int(target), logits.tolist())
        for rows in run(executor, manifest.limits, 4, sequences)
        for owner, target, logits in zip(rows.owners, rows.targets, rows.logits, strict=True)
    ]
    assert found == [
        (owner, int(tokens[owner][position]), predict(tokens[owner][:position].tolist()).tolist())
        for owner, first in ((0, 1), (1, 8), (3, 4))
        for position in range(first, len(tokens[owner]))
    ]


def test_log_likelihood_is_exact_for_logits_far_apart() -> None:
    logits = np.array([[0.0, 80.0, -500.0], [1e4, 1e4, 1e4]], dtype=np.float32)
    own = target_log_probabilities(logits, np.array([2, 0], np.int32))
    assert own.tolist() == pytest.approx([-580.0 - np.log1p(np.exp(-80.0)), -np.log(3.0)], 1e-15)


@pytest.mark.parametrize("num_rows", [0, 1, 31, 32, 33, 97])
def test_log_probabilities_of_targets_are_those_of_all_tokens(num_rows: int) -> None:
    rng = np.random.default_rng(num_rows)
    logits = 5 * rng.standard_normal((num_rows, 11)).astype(np.float32)
    targets = rng.integers(0, 11, num_rows).astype(np.int32)
    own = target_log_probabilities(logits, targets)
    assert own.tolist() == log_probabilities(logits)[np.arange(num_rows), targets].tolist()
