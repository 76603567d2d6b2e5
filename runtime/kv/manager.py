"""The KV manager: the block table of every sequence that holds KV memory."""

from array import array

from llmbuild.runtime.kv.pool import BlockId, BlockPool
from llmbuild.runtime.sequence import SequenceId


class KVManager:
    """Maps the logical blocks of sequences to physical blocks of one pool.

    Invariant: the live blocks of the pool are those of the tables, each in one table once.
    """

    def __init__(self, pool: BlockPool, block_size: int) -> None:
        assert block_size >= 1
        self.pool = pool
        self.block_size = block_size
        self._tables: dict[SequenceId, array[int]] = {}

    def reset(self) -> None:
        """No sequence holds blocks any more."""
        self._tables = {}
        self.pool.reset()

    def num_blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold `num_tokens` positions of one sequence."""
        return -(-num_tokens // self.block_size)

    def num_missing(self, sequence_id: SequenceId, num_tokens: int) -> int:
        """Blocks that the sequence's table lacks to hold `num_tokens` positions."""
        return max(0, self.num_blocks_for(num_tokens) - len(self._tables.get(sequence_id, ())))

    def grow(self, sequence_id: SequenceId, num_tokens: int) -> bool:
        """Make the sequence's table hold `num_tokens` positions; False if blocks are lacking.

        A refusal changes nothing. A table never shrinks.
        """
        missing = self.num_missing(sequence_id, num_tokens)
        if missing > self.pool.num_free:
            return False
        if missing > 0:
            self._tables.setdefault(sequence_id, array("i")).extend(self.pool.allocate(missing))
        return True

    def table(self, sequence_id: SequenceId) -> "array[int]":
        """The physical block of each logical block, as int32."""
        return self._tables[sequence_id]

    def free(self, sequence_id: SequenceId) -> None:
        """Give back all blocks of a sequence that has a table."""
        assert sequence_id in self._tables, f"sequence {sequence_id} holds no blocks"
        self.pool.free(BlockId(block) for block in self._tables.pop(sequence_id))

    @property
    def holders(self) -> frozenset[SequenceId]:
        return frozenset(self._tables)

    def check(self) -> None:
        self.pool.check()
        blocks = [block for table in self._tables.values() for block in table]
        assert len(blocks) == len(set(blocks)), "a block is in two tables"
        assert set(blocks) == self.pool.live, "a live block is in no table"
