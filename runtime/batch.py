"""One step's input: the ragged arrays of the step graph (docs/step-graph.md)."""

from array import array
from typing import TYPE_CHECKING, TypeAlias, cast

if TYPE_CHECKING:  # imported when an array is looked at, which serving doesn't
    import numpy as np
    from numpy.typing import NDArray

Int32Array: TypeAlias = "NDArray[np.int32]"
Int32s: TypeAlias = "Int32Array | array[int] | memoryview"

ARRAYS = ("token_ids", "positions", "query_start", "kv_lengths", "block_tables", "logit_rows")


class StepBatch:
    """Tokens of several sequences in one step; every array is int32.

    token_ids, positions: [T]. query_start: [S+1], token offsets of each sequence.
    kv_lengths: [S], length of each sequence after this step. block_tables: [S, B], the
    physical block of each logical block (unused entries are the scratch block, 0).
    logit_rows: [R], the tokens whose logits are wanted.

    They lie in `data` one after the other, as native code reads them; looked at by name, they
    are numpy's views of it.
    """

    __slots__ = ("blocks_per_sequence", "data", "num_logit_rows", "num_sequences", "num_tokens")

    def __init__(
        self,
        *,
        token_ids: Int32s,
        positions: Int32s,
        query_start: Int32s,
        kv_lengths: Int32s,
        block_tables: Int32s,
        logit_rows: Int32s,
    ) -> None:
        """Copies the arrays."""
        shape = _view(block_tables).shape
        assert shape is not None
        self.num_sequences, self.blocks_per_sequence = shape
        self.num_tokens = len(token_ids)
        self.num_logit_rows = len(logit_rows)
        self.data = array("i")
        for numbers in (token_ids, positions, query_start, kv_lengths, block_tables, logit_rows):
            self.data.frombytes(_view(numbers).tobytes())

    @property
    def is_decode(self) -> bool:
        """Every sequence brings one token and wants its logits."""
        return self.num_tokens == self.num_sequences == self.num_logit_rows

    def numbers(self, name: str) -> memoryview:
        """One of ARRAYS, flat, without numpy."""
        sizes = (
            self.num_tokens,
            self.num_tokens,
            self.num_sequences + 1,
            self.num_sequences,
            self.num_sequences * self.blocks_per_sequence,
            self.num_logit_rows,
        )
        index = ARRAYS.index(name)
        start = sum(sizes[:index])
        return memoryview(self.data)[start : start + sizes[index]]

    @property
    def token_ids(self) -> Int32Array:
        return self._array("token_ids")

    @property
    def positions(self) -> Int32Array:
        return self._array("positions")

    @property
    def query_start(self) -> Int32Array:
        return self._array("query_start")

    @property
    def kv_lengths(self) -> Int32Array:
        return self._array("kv_lengths")

    @property
    def block_tables(self) -> Int32Array:
        return self._array("block_tables").reshape(self.num_sequences, -1)

    @property
    def logit_rows(self) -> Int32Array:
        return self._array("logit_rows")

    def _array(self, name: str) -> Int32Array:
        import numpy as np

        return np.asarray(self.numbers(name))


def _view(numbers: Int32s) -> memoryview:
    view = memoryview(cast("array[int]", numbers))  # numpy's arrays are buffers as well
    assert view.format == "i", f"an array of format {view.format!r} isn't int32"
    return view


def as_tables(rows: bytes, width: int) -> memoryview:
    """Block tables [S, width] of rows that lie one after the other."""
    return memoryview(rows).cast("i", (len(rows) // (4 * width), width))
