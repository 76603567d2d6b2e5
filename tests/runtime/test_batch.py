from array import array

import numpy as np
import pytest

from llmbuild.runtime.batch import ARRAYS, StepBatch, as_tables

LISTS = {
    "token_ids": [7, 8, 9, 10],
    "positions": [0, 1, 2, 5],
    "query_start": [0, 3, 4],
    "kv_lengths": [3, 6],
    "block_tables": [[1, 0, 0], [2, 3, 4]],
    "logit_rows": [3],
}


def numpy_batch(**changes):
    return StepBatch(**{k: np.array(v, np.int32) for k, v in (LISTS | changes).items()})


def test_arrays_come_back_as_they_were_given():
    batch = numpy_batch()
    for name in ARRAYS:
        got = getattr(batch, name)
        assert got.dtype == np.int32
        assert got.flags.c_contiguous
        assert got.tolist() == LISTS[name]
    sizes = (batch.num_tokens, batch.num_sequences, batch.num_logit_rows)
    assert sizes == (4, 2, 1)
    assert batch.blocks_per_sequence == 3


def test_arrays_lie_in_the_order_of_their_names():
    flat = [np.ravel(LISTS[name]) for name in ARRAYS]
    assert numpy_batch().data.tolist() == np.concatenate(flat).tolist()


def test_arrays_of_python_give_the_same_batch():
    tables = array("i", [1, 0, 0, 2, 3, 4])
    plain = {k: array("i", v) for k, v in LISTS.items() if k != "block_tables"}
    batch = StepBatch(**plain, block_tables=as_tables(tables.tobytes(), 3))
    assert batch.data == numpy_batch().data
    assert batch.block_tables.tolist() == LISTS["block_tables"]


def test_arrays_are_copied():
    tokens = np.array(LISTS["token_ids"], np.int32)
    batch = numpy_batch(token_ids=tokens)
    tokens[:] = 0
    assert batch.token_ids.tolist() == LISTS["token_ids"]


def test_rows_without_logits_are_an_empty_array():
    assert numpy_batch(logit_rows=[]).logit_rows.shape == (0,)


def test_another_type_is_refused():
    with pytest.raises(AssertionError, match="int32"):
        StepBatch(**{k: np.array(v, np.int64) for k, v in LISTS.items()})


def test_only_one_token_with_logits_of_each_sequence_is_a_decode():
    decode = {"token_ids": [1, 2], "positions": [2, 5], "query_start": [0, 1, 2]}
    assert numpy_batch(**decode, logit_rows=[0, 1]).is_decode
    assert not numpy_batch(**decode, logit_rows=[1]).is_decode
    assert not numpy_batch().is_decode
