"""A sequence: its tokens, and how many of them are already computed."""

import enum
from typing import TYPE_CHECKING, Literal, NewType

import msgspec

from llmbuild.runtime.params import SamplingParams

if TYPE_CHECKING:
    import numpy as np

SequenceId = NewType("SequenceId", int)

FinishReason = Literal["eos", "stop", "length", "cancelled", "error"]


class State(enum.Enum):
    WAITING = enum.auto()  # holds no blocks
    RUNNING = enum.auto()  # holds the blocks of its computed tokens at least
    FINISHED = enum.auto()  # holds no blocks and never will


class Sequence(msgspec.Struct, eq=False):
    """Prompt and output tokens of one request, moved forward by steps.

    There are no phases: a step computes some of the tokens that aren't computed yet, and when
    none is left the next one is sampled. `id` is the order of arrival. rng: the request's own,
    so that batch mates don't change its draws; None where nothing is drawn.
    """

    id: SequenceId
    tokens: list[int]
    num_prompt_tokens: int
    params: SamplingParams
    rng: "np.random.Generator | None" = None
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
