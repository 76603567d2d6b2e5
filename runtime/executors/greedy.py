"""Greedy choice among logits, and the step that follows it."""

import numpy as np
from numpy.typing import NDArray

from llmbuild.runtime.batch import ARRAYS, StepBatch


def likeliest(logits: NDArray[np.float32]) -> NDArray[np.int64]:
    """The token of each row's largest logit, the lowest of a tie; ~token where it isn't finite."""
    tokens = logits.argmax(axis=1)
    largest = np.take_along_axis(logits, tokens[:, None], axis=1)[:, 0]
    return np.where(np.isfinite(largest), tokens, ~tokens)


def next_step(batch: StepBatch, tokens: NDArray[np.int32]) -> StepBatch:
    """The decode step on the tokens that this one gave. Of one that went wrong the tokens aren't
    used: 0 stands for it."""
    token_ids = np.zeros(batch.num_tokens, np.int32)
    token_ids[batch.logit_rows] = np.maximum(tokens, 0)
    later = {"positions": batch.positions + 1, "kv_lengths": batch.kv_lengths + 1}
    arrays = {name: getattr(batch, name) for name in ARRAYS}
    return StepBatch(**arrays | later | {"token_ids": token_ids})
