"""Steps on a linear KV cache: whatever the order of sequences, and of prompts in chunks and decoded
tokens, each slot holds its sequence's tokens, and each logits row is of the token that it names."""

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmbuild.runtime.batch import ARRAYS, StepBatch
from llmbuild.runtime.bucket import pad_to_bucket
from llmbuild.runtime.executors.linear_kv import LinearSlots, SlotExecution

CAPACITY = 11
NUM_SLOTS = 6


def batch_of(
    parts: Sequence[tuple[int, int, list[int]]], wanted: Sequence[bool] | None = None
) -> StepBatch:
    """parts: slot, first position, token ids. wanted: whose last token's logits are."""
    ends = np.cumsum([len(tokens) for _, _, tokens in parts])
    wanted = wanted or [True] * len(parts)
    return StepBatch(
        token_ids=np.concatenate([tokens for _, _, tokens in parts]).astype(np.int32),
        positions=np.concatenate(
            [np.arange(first, first + len(tokens)) for _, first, tokens in parts]
        ).astype(np.int32),
        query_start=np.array([0, *ends], np.int32),
        kv_lengths=np.array([first + len(tokens) for _, first, tokens in parts], np.int32),
        block_tables=np.array([[slot + 1] for slot, _, _ in parts], np.int32),
        logit_rows=np.array(
            [end - 1 for end, is_in in zip(ends, wanted, strict=True) if is_in]
        ).astype(np.int32),
    )


class Device:
    """What a plan would do: caches that hold token ids; a row's logits are all that its token
    attends to."""

    def __init__(self, max_rows: int = NUM_SLOTS) -> None:
        self.max_rows = max_rows
        self.caches = np.full((NUM_SLOTS, CAPACITY), -1)

    def run(self, execution: SlotExecution) -> list[list[int]]:
        inputs = execution.inputs
        for name, array in inputs.items():
            assert array.dtype == np.int32, name
        rows, length = inputs["token_ids"].shape
        slots = range(execution.first_slot, execution.first_slot + rows)
        assert slots.stop <= NUM_SLOTS
        assert inputs["positions"].shape == (rows, length)
        for row, slot in enumerate(slots):
            begin = inputs["write_indices"][row]
            assert begin + length == inputs["kv_lengths"][row] <= CAPACITY
            np.testing.assert_array_equal(
                inputs["positions"][row], np.arange(begin, begin + length)
            )
            self.caches[slot, begin : begin + length] = inputs["token_ids"][row]
        assert 1 <= len(inputs["logit_rows"]) <= (rows if execution.is_decode else self.max_rows)
        seen = []
        for flat in inputs["logit_rows"]:
            row, column = divmod(int(flat), length)
            end = inputs["positions"][row, column] + 1
            seen.append(self.caches[execution.first_slot + row, :end].tolist())
        return seen[: len(execution.results)]


def run_step(slots: LinearSlots, device: Device, batch: StepBatch) -> list[list[int] | None]:
    logits: list[list[int] | None] = [None] * batch.num_logit_rows
    for execution in slots.executions(batch):
        for row, seen in zip(execution.results, device.run(execution), strict=True):
            assert logits[row] is None
            logits[row] = seen
    return logits


@given(st.data())
def test_any_order_of_steps_leaves_each_slot_its_sequence(data: st.DataObject) -> None:
    buckets = data.draw(st.sampled_from([[1], [1, 2], [1, 2, 4], [1, 3, 6], [1, 2, 8]]))
    slots, device = LinearSlots(NUM_SLOTS, CAPACITY, buckets, 2), Device()
    held: dict[int, list[int]] = {}
    for _ in range(data.draw(st.integers(1, 8))):
        chosen = data.draw(st.permutations(range(NUM_SLOTS)))[
            : data.draw(st.integers(1, NUM_SLOTS))
        ]
        parts, wanted = [], []
        for slot in chosen:
            begins_anew = (
                slot not in held or len(held[slot]) == CAPACITY or data.draw(st.booleans())
            )
            before = [] if begins_anew else held[slot]
            count = data.draw(st.integers(1, min(4, CAPACITY - len(before))))
            tokens = data.draw(st.lists(st.integers(0, 99), min_size=count, max_size=count))
            parts.append((slot, len(before), tokens))
            held[slot] = [*before, *tokens]
            wanted.append(data.draw(st.booleans()))
        logits = run_step(slots, device, batch_of(parts, wanted))
        rows = [held[slot] for slot, is_in in zip(chosen, wanted, strict=True) if is_in]
        assert logits == rows
        for slot, tokens in held.items():
            count = min(len(tokens), CAPACITY - 1)  # a sequence ends when its slot is full
            assert device.caches[slot, :count].tolist() == tokens[:count]


def test_padding_of_a_bucket_takes_no_slot() -> None:
    slots, device = LinearSlots(NUM_SLOTS, CAPACITY, [1, 2, 4], 4), Device()
    batch = pad_to_bucket(batch_of([(5, 0, [7]), (2, 0, [8]), (3, 0, [9])]), [1, 2, 4])
    assert batch.num_sequences == 4
    assert run_step(slots, device, batch) == [[7], [8], [9], None]


@pytest.mark.parametrize(
    ("used", "executions"),
    [([0], [(0, 1)]), ([0, 1, 2], [(0, 4)]), ([5], [(5, 1)]), ([3, 5], [(2, 4)]), ([0, 5], None)],
)
def test_decoding_slots_share_an_execution_of_a_bucket(
    used: list[int], executions: list[tuple[int, int]] | None
) -> None:
    """Beyond the largest bucket they are divided."""
    slots = LinearSlots(NUM_SLOTS, CAPACITY, [1, 2, 4], 4)
    made = slots.executions(batch_of([(slot, 0, [1]) for slot in used]))
    assert [(each.first_slot, each.num_slots) for each in made] == (executions or [(0, 1), (5, 1)])
    assert all(each.is_decode for each in made)


def test_prompts_run_alone_with_their_own_length() -> None:
    slots = LinearSlots(NUM_SLOTS, CAPACITY, [1, 2], 2)
    made = slots.executions(batch_of([(4, 0, [1, 2, 3]), (1, 0, [4, 5])]))
    assert [(each.first_slot, each.inputs["token_ids"].tolist()) for each in made] == [
        (4, [[1, 2, 3]]),
        (1, [[4, 5]]),
    ]
    assert not any(each.is_decode for each in made)


def test_a_prompt_that_wants_more_logits_than_a_plan_gives_is_divided() -> None:
    slots, device = LinearSlots(NUM_SLOTS, CAPACITY, [1], 2), Device(2)
    batch = batch_of([(3, 0, [5, 6, 7, 8, 9, 4])])
    arrays = {name: getattr(batch, name) for name in ARRAYS}
    wanted = StepBatch(**arrays | {"logit_rows": np.array([5, 1, 2, 3, 4], np.int32)})
    tokens = [5, 6, 7, 8, 9, 4]
    assert run_step(slots, device, wanted) == [tokens[:count] for count in (6, 2, 3, 4, 5)]
