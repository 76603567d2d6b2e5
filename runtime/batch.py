"""One step's input: the ragged arrays of the step graph (docs/step-graph.md)."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Int32Array = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class StepBatch:
    """Tokens of several sequences in one step; every array is int32 and C-contiguous.

    token_ids, positions: [T]. query_start: [S+1], token offsets of each sequence.
    kv_lengths: [S], length of each sequence after this step. block_tables: [S, B], the
    physical block of each logical block (unused entries are the scratch block, 0).
    logit_rows: [R], the tokens whose logits are wanted.
    """

    token_ids: Int32Array
    positions: Int32Array
    query_start: Int32Array
    kv_lengths: Int32Array
    block_tables: Int32Array
    logit_rows: Int32Array

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_sequences(self) -> int:
        return len(self.kv_lengths)

    @property
    def is_decode(self) -> bool:
        """Every sequence brings one token and wants its logits."""
        return self.num_tokens == self.num_sequences == len(self.logit_rows)
