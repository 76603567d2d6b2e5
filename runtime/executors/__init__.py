"""What runs a step: each target's executor has this interface."""

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from llmbuild.runtime.batch import StepBatch


class Executor(Protocol):
    """Owns the weights and the KV pools of an engine that is loaded."""

    def step(self, batch: "StepBatch") -> "NDArray[np.float32]":
        """Write the step's KV entries and return logits [R, vocab], fp32; R may be 0."""
        ...

    def step_greedy(self, batch: "StepBatch", num_steps: int = 1) -> list[list[int]]:
        """The likeliest tokens of each row, num_steps of them; ties go to the lowest id.

        More than one are those of as many steps, each on the tokens of the one before. The batch
        must be a pure decode then, and the block tables have room for all of them. A row whose
        largest logit isn't finite gives ~id (negative) of that logit.
        """
        ...

    def close(self) -> None:
        """Give all memory back; a second call does nothing."""
        ...
