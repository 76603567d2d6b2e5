"""Executions over paged KV pools: of few shapes, whose padding belongs to no sequence."""

import numpy as np
import pytest

from llmbuild.runtime.batch import StepBatch
from llmbuild.runtime.executors.execution import Execution
from llmbuild.runtime.executors.paged_kv import PagedSteps, pool_offsets
from llmbuild.runtime.manifest import KVLayer, KVLayout

STEPS = PagedSteps(tokens=24, sequences=6, blocks=3, buckets=[1, 2, 4])


def batch_of(counts: list[int], rows: int | None = None) -> StepBatch:
    """Sequences with so many tokens, all of them new; the logits of the last `rows` tokens."""
    starts = np.cumsum([0, *counts]).astype(np.int32)
    total = int(starts[-1])
    wanted = starts[1:] - 1 if rows is None else np.arange(total - rows, total)
    return StepBatch(
        token_ids=np.arange(1, total + 1, dtype=np.int32),
        positions=np.concatenate([np.arange(n) for n in counts]).astype(np.int32),
        query_start=starts,
        kv_lengths=np.array(counts, np.int32),
        block_tables=np.arange(1, len(counts) + 1, dtype=np.int32)[:, None],
        logit_rows=wanted.astype(np.int32),
    )


def sizes(execution: Execution) -> tuple[int, int]:
    return len(execution.inputs["token_ids"]), len(execution.inputs["kv_lengths"])


@pytest.mark.parametrize(("count", "bucket"), [(1, 1), (2, 2), (3, 4), (4, 4), (5, 6), (6, 6)])
def test_decode_steps_have_the_shape_of_their_bucket(count: int, bucket: int) -> None:
    (execution,) = STEPS.executions(batch_of([1] * count))
    assert execution.is_decode
    assert sizes(execution) == (bucket, bucket)


@pytest.mark.parametrize(("counts", "tokens"), [([3], 4), ([4, 1], 8), ([9, 8], 24), ([24], 24)])
def test_other_steps_have_a_power_of_two_of_tokens(counts: list[int], tokens: int) -> None:
    (execution,) = STEPS.executions(batch_of(counts))
    assert not execution.is_decode
    assert sizes(execution) == (tokens, 6)


def test_padding_belongs_to_no_sequence() -> None:
    (execution,) = STEPS.executions(batch_of([3, 2]))
    inputs = execution.inputs
    assert inputs["query_start"].tolist() == [0, 3, 5, 5, 5, 5, 5]
    assert inputs["kv_lengths"].tolist() == [3, 2, 0, 0, 0, 0]
    assert inputs["token_ids"].tolist() == [1, 2, 3, 4, 5, 0, 0, 0]
    assert inputs["block_tables"].tolist() == [[1, 0, 0], [2, 0, 0], *[[0, 0, 0]] * 4]
    assert inputs["logit_rows"].tolist() == [2, 4, 0, 0, 0, 0]
    assert execution.results.tolist() == [0, 1]
    assert {values.dtype for values in inputs.values()} == {np.dtype(np.int32)}


def test_rows_beyond_a_plans_take_more_executions() -> None:
    first, second = STEPS.executions(batch_of([8], rows=8))
    assert first.results.tolist() == [0, 1, 2, 3, 4, 5]
    assert second.results.tolist() == [6, 7]
    assert second.inputs["logit_rows"].tolist() == [6, 7, 0, 0, 0, 0]


def test_no_execution_is_larger_than_the_room_that_is_taken_for_it() -> None:
    most = STEPS.most_numbers
    for counts in ([1] * 6, [24], [4] * 6):
        for execution in STEPS.executions(batch_of(counts)):
            assert execution.inputs.keys() == most.keys()
            assert all(values.size <= most[name] for name, values in execution.inputs.items())


def test_pools_lie_apart_and_take_what_the_layout_says() -> None:
    kinds = [("fp16", "int8"), ("int8-static", "int4")]
    layers = [KVLayer.of_heads([kind] * 3) for kind in kinds]
    kv = KVLayout(block_size=4, num_kv_heads=3, head_dim=8, layers=layers)
    assert kv.pool_bytes == {
        "pool.0.k_items": 3 * 4 * 8 * 2,
        "pool.0.v_items": 3 * 4 * 8,
        "pool.0.v_scales": 3 * 4 * 4,
        "pool.1.k_items": 3 * 4 * 8,
        "pool.1.v_items": 3 * 4 * 4,
        "pool.1.v_scales": 3 * 4 * 2,
        "pool.1.v_minima": 3 * 4 * 2,
    }
    assert sum(kv.pool_bytes.values()) == kv.block_bytes
    offsets, size = pool_offsets(kv, 7)
    ends = [*list(offsets.values())[1:], size]
    for (name, begin), end in zip(offsets.items(), ends, strict=True):
        assert begin % 256 == 0
        assert 7 * kv.pool_bytes[name] <= end - begin < 7 * kv.pool_bytes[name] + 256
