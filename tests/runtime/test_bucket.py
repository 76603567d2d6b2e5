import numpy as np
import pytest

from llmbuild.runtime.batch import StepBatch
from llmbuild.runtime.bucket import pad_to_bucket
from llmbuild.runtime.params import SamplingParams


def decode_batch(size, width=3):
    tables = np.arange(1, size * width + 1, dtype=np.int32).reshape(size, width)
    return StepBatch(
        token_ids=np.arange(50, 50 + size, dtype=np.int32),
        positions=np.arange(5, 5 + size, dtype=np.int32),
        query_start=np.arange(size + 1, dtype=np.int32),
        kv_lengths=np.arange(6, 6 + size, dtype=np.int32),
        block_tables=tables,
        logit_rows=np.arange(size, dtype=np.int32),
    )


def test_padding_sequences_have_one_token_in_the_scratch_block():
    batch = decode_batch(5)
    padded = pad_to_bucket(batch, [1, 2, 4, 8, 16])
    assert padded.num_sequences == 8
    assert padded.is_decode
    for name in ("token_ids", "positions", "kv_lengths", "block_tables", "logit_rows"):
        assert np.array_equal(getattr(padded, name)[:5], getattr(batch, name))
        assert getattr(padded, name).dtype == np.int32
    assert padded.query_start.tolist() == list(range(9))
    assert padded.logit_rows.tolist() == list(range(8))
    assert padded.token_ids[5:].tolist() == [0, 0, 0]
    assert padded.positions[5:].tolist() == [0, 0, 0]
    assert padded.kv_lengths[5:].tolist() == [1, 1, 1]
    assert not padded.block_tables[5:].any()


@pytest.mark.parametrize(("size", "buckets"), [(4, [1, 4]), (5, [1, 4]), (1, [1]), (3, [])])
def test_batch_of_a_bucket_or_past_the_last_is_unchanged(size, buckets):
    batch = decode_batch(size)
    assert pad_to_bucket(batch, buckets) is batch


def test_batch_that_is_no_pure_decode_is_unchanged():
    prefill = StepBatch(
        token_ids=np.zeros(3, np.int32),
        positions=np.array([0, 1, 4], np.int32),
        query_start=np.array([0, 2, 3], np.int32),
        kv_lengths=np.array([2, 5], np.int32),
        block_tables=np.array([[1], [2]], np.int32),
        logit_rows=np.array([1, 2], np.int32),
    )
    assert pad_to_bucket(prefill, [4, 8]) is prefill
    partial = StepBatch(
        token_ids=np.zeros(2, np.int32),
        positions=np.array([0, 4], np.int32),
        query_start=np.array([0, 1, 2], np.int32),
        kv_lengths=np.array([1, 5], np.int32),
        block_tables=np.array([[1], [2]], np.int32),
        logit_rows=np.array([1], np.int32),
    )
    assert pad_to_bucket(partial, [4, 8]) is partial


def test_five_sequences_in_a_bucket_of_eight_change_only_their_slots_and_scratch(make_rig):
    rig = make_rig(buckets=(8,), block_size=3, num_blocks=30)
    requests = [
        rig.loop.submit(range(10, 10 + length), SamplingParams(max_tokens=6, ignore_eos=True))
        for length in (1, 2, 3, 5, 7)
    ]
    while any(request.sequence.num_output_tokens < 2 for request in requests):
        rig.loop.step()
    before = rig.executor.kv.copy()
    rig.executor.kv[0] = before[0] = -2  # so that writes to the scratch block show
    rig.loop.step()
    assert rig.executor.batches[-1].num_sequences == 8
    expected = {(0, 0): 0}
    for request in requests:
        sequence = request.sequence
        position = sequence.num_computed_tokens - 1
        block = rig.manager.table(sequence.id)[position // 3]
        expected[block, position % 3] = sequence.tokens[position]
    places = np.argwhere(rig.executor.kv != before)
    changed = {(int(block), int(slot)) for block, slot in places}
    assert changed == set(expected)
    assert all(rig.executor.kv[place] == token for place, token in expected.items())
