"""What runs a step: each target's executor has this interface."""

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from llmbuild.runtime.batch import StepBatch


class Executor(Protocol):
    """Owns the weights and the KV pools of an engine that is loaded."""

    def step(self, batch: StepBatch) -> NDArray[np.float32]:
        """Write the step's KV entries and return logits [R, vocab], fp32; R may be 0."""
        ...

    def close(self) -> None:
        """Give all memory back; a second call does nothing."""
        ...
