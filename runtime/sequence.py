"""A sequence: its tokens, and how many of them are already computed."""

import enum
from dataclasses import dataclass
from typing import Literal, NewType

import numpy as np

from llmbuild.runtime.sampling import SamplingParams

SequenceId = NewType("SequenceId", int)

FinishReason = Literal["eos", "stop", "length", "cancelled", "error"]


class State(enum.Enum):
    WAITING = enum.auto()  # holds no blocks
    RUNNING = enum.auto()  # holds the blocks of its computed tokens at least
    FINISHED = enum.auto()  # holds no blocks and never will


@dataclass(slots=True, eq=False)
class Sequence:
    """Prompt and output tokens of one request, moved forward by steps.

    There are no phases: a step computes some of the tokens that aren't computed yet, and when
    none is left the next one is sampled. `id` is the order of arrival.
    """

    id: SequenceId
    tokens: list[int]
    num_prompt_tokens: int
    params: SamplingParams
    rng: np.random.Generator  # the request's own, so that batch mates don't change its draws
    num_computed_tokens: int = 0
    num_preemptions: int = 0
    state: State = State.WAITING
    finish_reason: FinishReason | None = None

    @property
    def num_pending_tokens(self) -> int:
        """Tokens whose KV entries aren't in the cache yet."""
        return len(self.tokens) - self.num_computed_tokens

    @property
    def num_output_tokens(self) -> int:
        return len(self.tokens) - self.num_prompt_tokens

    @property
    def output_ids(self) -> tuple[int, ...]:
        return tuple(self.tokens[self.num_prompt_tokens :])
