import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmbuild.runtime.kv.manager import KVManager
from llmbuild.runtime.kv.pool import BlockPool


@pytest.mark.parametrize(
    ("num_tokens", "blocks"), [(1, 1), (6, 1), (7, 1), (8, 2), (14, 2), (15, 3)]
)
def test_table_holds_just_enough_blocks(num_tokens, blocks):
    manager = KVManager(BlockPool(9), block_size=7)
    assert manager.grow(0, num_tokens)
    assert len(manager.table(0)) == blocks


def test_refused_growth_changes_nothing():
    manager = KVManager(BlockPool(4), block_size=2)
    assert manager.grow(0, 4)
    before = list(manager.table(0))
    assert not manager.grow(0, 9)
    assert not manager.grow(1, 3)
    assert list(manager.table(0)) == before
    assert manager.holders == {0}
    assert manager.pool.num_free == 1
    manager.check()


def test_growth_keeps_the_blocks_that_are_there():
    manager = KVManager(BlockPool(6), block_size=3)
    assert manager.grow(0, 3)
    first = manager.table(0)[0]
    assert manager.grow(0, 7)
    assert manager.table(0)[0] == first
    assert len(manager.table(0)) == 3


def test_blocks_are_freed_once():
    manager = KVManager(BlockPool(4), block_size=2)
    manager.grow(0, 5)
    manager.free(0)
    assert manager.pool.num_free == 3
    with pytest.raises(AssertionError, match="holds no blocks"):
        manager.free(0)


@settings(deadline=None)
@given(num_blocks=st.integers(2, 13), block_size=st.integers(1, 5), data=st.data())
def test_tables_never_share_a_block(num_blocks, block_size, data):
    manager = KVManager(BlockPool(num_blocks), block_size)
    tokens = {}
    for _ in range(data.draw(st.integers(0, 25))):
        sequence = data.draw(st.integers(0, 4))
        if sequence in tokens and data.draw(st.booleans()):
            manager.free(sequence)
            del tokens[sequence]
        else:
            more = tokens.get(sequence, 0) + data.draw(st.integers(1, 9))
            if manager.grow(sequence, more):
                tokens[sequence] = more
        manager.check()
        held = sum(-(-count // block_size) for count in tokens.values())
        assert manager.pool.num_free + held + 1 == num_blocks
        assert manager.holders == set(tokens)
