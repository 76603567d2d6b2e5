"""The pool of KV blocks: which physical blocks are free and which are live."""

from collections.abc import Iterable
from typing import NewType

from llmbuild.runtime.manifest import SCRATCH_BLOCK

BlockId = NewType("BlockId", int)


class BlockPool:
    """Hands out the blocks 1 .. num_blocks - 1; block 0 is the scratch block.

    Invariant: free + live + the scratch block = num_blocks, and no block is in two places.
    """

    def __init__(self, num_blocks: int) -> None:
        assert num_blocks >= 2, f"a pool needs the scratch block and one more, got {num_blocks}"
        self.num_blocks = num_blocks
        self._free: list[BlockId] = []
        self._live: set[BlockId] = set()
        self.reset()

    def reset(self) -> None:
        """All blocks are free again, whatever was done before."""
        # Used as a stack: the block freed last is handed out first, while it's still in cache.
        self._free = [BlockId(i) for i in range(self.num_blocks - 1, SCRATCH_BLOCK, -1)]
        self._live = set()

    @property
    def num_usable(self) -> int:
        """Blocks that sequences can hold: all but the scratch block."""
        return self.num_blocks - 1

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def live(self) -> frozenset[BlockId]:
        return frozenset(self._live)

    def allocate(self, count: int) -> list[BlockId]:
        """Take `count` blocks; the caller has made sure that so many are free."""
        assert 0 <= count <= self.num_free, f"{count} blocks asked, {self.num_free} are free"
        blocks = [self._free.pop() for _ in range(count)]
        self._live.update(blocks)
        return blocks

    def free(self, blocks: Iterable[BlockId]) -> None:
        """Give blocks back; each must be live."""
        for block in blocks:
            assert block in self._live, f"block {block} is freed but isn't live"
            self._live.remove(block)
            self._free.append(block)

    def check(self) -> None:
        free = set(self._free)
        assert len(free) == len(self._free), "a block is on the free list twice"
        assert not free & self._live, "a block is both free and live"
        assert free | self._live | {SCRATCH_BLOCK} == set(range(self.num_blocks))
        assert SCRATCH_BLOCK not in free | self._live, "the scratch block was handed out"
