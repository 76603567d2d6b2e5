import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmbuild.runtime.kv.pool import BlockPool


@settings(deadline=None)
@given(num_blocks=st.integers(2, 17), data=st.data())
def test_free_and_live_and_scratch_make_the_total_at_every_step(num_blocks, data):
    pool = BlockPool(num_blocks)
    held = []
    for _ in range(data.draw(st.integers(0, 30))):
        if data.draw(st.booleans()):
            blocks = pool.allocate(data.draw(st.integers(0, pool.num_free)))
            held += blocks
        else:
            count = data.draw(st.integers(0, len(held)))
            pool.free(held[:count])
            held = held[count:]
        pool.check()
        assert pool.live == set(held)
        assert len(held) == len(set(held))
        assert pool.num_free + len(held) + 1 == num_blocks


def test_every_block_but_the_scratch_block_is_handed_out():
    assert sorted(BlockPool(7).allocate(6)) == [1, 2, 3, 4, 5, 6]


def test_double_free_is_refused():
    pool = BlockPool(4)
    blocks = pool.allocate(2)
    pool.free(blocks)
    with pytest.raises(AssertionError, match="isn't live"):
        pool.free(blocks)


def test_scratch_block_cannot_be_freed():
    pool = BlockPool(4)
    with pytest.raises(AssertionError, match="block 0"):
        pool.free([0])


def test_more_blocks_than_are_free_are_refused():
    pool = BlockPool(4)
    with pytest.raises(AssertionError, match="4 blocks asked, 3 are free"):
        pool.allocate(4)


def test_pool_without_a_usable_block_is_refused():
    with pytest.raises(AssertionError):
        BlockPool(1)


@pytest.mark.parametrize("damage", ["lost", "both", "twice"])
def test_check_finds_damage(damage):
    pool = BlockPool(5)
    pool.allocate(2)
    if damage == "lost":
        pool._free.pop()
    elif damage == "both":
        pool._live.add(pool._free[0])
    else:
        pool._free.append(pool._free[0])
    with pytest.raises(AssertionError):
        pool.check()
