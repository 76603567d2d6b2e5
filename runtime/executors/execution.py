"""One run of a plan."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Int32Array = NDArray[np.int32]


@dataclass(frozen=True)
class Execution:
    """`inputs`: int32, by the plan's names; what the KV cache is given by is not among them.
    results: which rows of the step's logits the first rows of the plan's are; what follows these is
    padding, for a plan has one row at least."""

    is_decode: bool
    inputs: dict[str, Int32Array]
    results: Int32Array
