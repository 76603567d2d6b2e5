"""Log probabilities of logits, in float64, a few rows at a time so that memory stays bounded."""

import math
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from llmbuild.runtime.batch import Int32Array

ROWS_AT_A_TIME = 32


def row_chunks(num_rows: int) -> Iterator[slice]:
    for start in range(0, num_rows, ROWS_AT_A_TIME):
        yield slice(start, start + ROWS_AT_A_TIME)


def log_probabilities(logits: NDArray[np.float32]) -> NDArray[np.float64]:
    """Natural, of every token: [R, vocab] of logits [R, vocab]."""
    rows = logits.astype(np.float64)
    rows -= rows.max(axis=1, keepdims=True)
    rows -= np.log(np.exp(rows).sum(axis=1, keepdims=True))
    return rows


def target_log_probabilities(
    logits: NDArray[np.float32], targets: Int32Array
) -> NDArray[np.float64]:
    """Natural, of `targets` [R] under logits [R, vocab]: [R]."""
    own = np.empty(len(targets))
    for chunk in row_chunks(len(targets)):
        rows = log_probabilities(logits[chunk])
        own[chunk] = rows[np.arange(len(rows)), targets[chunk]]
    return own


def summed_kl(reference: NDArray[np.float64], other: NDArray[np.float64]) -> float:
    """KL(reference || other) in nats, summed over the rows of log probabilities [R, vocab]."""
    return float((np.exp(reference) * (reference - other)).sum())


def mean_kl(reference_logits: NDArray[np.float32], logits: NDArray[np.float32]) -> float:
    """KL(reference || other) in nats, mean over the rows of logits [R, vocab]; infinite where any
    isn't a finite number."""
    total = 0.0
    for chunk in row_chunks(len(logits)):
        rows = reference_logits[chunk], logits[chunk]
        if not all(np.isfinite(each).all() for each in rows):
            return math.inf
        total += summed_kl(*map(log_probabilities, rows))
    return max(total / len(logits), 0.0)
