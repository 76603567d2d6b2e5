import math
import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmbuild.errors import RequestError
from llmbuild.runtime.params import SamplingParams
from llmbuild.runtime.sequence import State

ALL = SamplingParams(max_tokens=9, ignore_eos=True)


@st.composite
def workloads(draw):
    """Limits, a pool that holds at least the largest request, and requests over time."""
    block_size = draw(st.sampled_from([1, 2, 3, 4, 7]))
    requests = draw(
        st.lists(
            st.fixed_dictionaries(
                {
                    "prompt": st.lists(st.integers(0, 299), min_size=1, max_size=15),
                    "max_tokens": st.integers(1, 10),
                    "temperature": st.sampled_from([0.0, 0.8]),
                    "seed": st.integers(0, 3),
                    "arrives": st.integers(0, 12),
                    "cancelled": st.none() | st.integers(0, 30),
                }
            ),
            min_size=1,
            max_size=7,
        )
    )
    largest = max(len(r["prompt"]) + r["max_tokens"] - 1 for r in requests)
    needed = -(-largest // block_size)
    options = {
        "block_size": block_size,
        "num_blocks": needed + 1 + draw(st.integers(0, 6)),
        "max_step_tokens": draw(st.integers(1, 20)),
        "max_sequences": draw(st.integers(1, 5)),
        "chunk_tokens": draw(st.none() | st.integers(1, 8)),
        "buckets": draw(st.sampled_from([(), (1, 2, 4, 8)])),
        "call_s": draw(st.sampled_from([0.0, math.inf])),  # single steps, or many in a call
    }
    return options, requests


@settings(deadline=None, max_examples=250)
@given(workload=workloads())
def test_any_mix_of_requests_gives_the_tokens_of_running_alone(make_rig, workload):
    options, wanted = workload
    rig = make_rig(**options)
    live, done = {}, {}
    for now in range(3000):
        for index, want in enumerate(wanted):
            if want["arrives"] == now:
                params = SamplingParams(
                    max_tokens=want["max_tokens"],
                    temperature=want["temperature"],
                    seed=want["seed"],
                )
                live[index] = rig.loop.submit(want["prompt"], params)
            if want["cancelled"] == now and index in live:
                rig.loop.cancel(live[index])
        has_run = rig.loop.step()
        rig.loop.check()
        pool = rig.manager.pool
        assert pool.num_free + len(pool.live) + 1 == options["num_blocks"]
        done |= {i: r for i, r in live.items() if r.finish_reason is not None}
        if not has_run and now > 12:
            break
    assert set(done) == set(range(len(wanted)))
    assert rig.manager.pool.num_free == options["num_blocks"] - 1
    for index, request in done.items():
        alone = rig.run_alone(wanted[index]["prompt"], request.sequence.params)
        tokens = list(request.sequence.output_ids)
        if request.finish_reason == "cancelled":
            assert tokens == alone[: len(tokens)]
        else:
            assert tokens == alone


@settings(deadline=None, max_examples=60)
@given(workload=workloads())
def test_no_step_exceeds_the_limits(make_rig, workload):
    options, wanted = workload
    rig = make_rig(**{**options, "buckets": ()})
    for want in wanted:
        rig.loop.submit(want["prompt"], SamplingParams(max_tokens=want["max_tokens"]))
    rig.run_to_end()
    chunk = options["chunk_tokens"] or options["max_step_tokens"]
    for batch in rig.executor.batches:
        assert 1 <= batch.num_tokens <= options["max_step_tokens"]
        assert batch.num_sequences <= options["max_sequences"]
        assert np.diff(batch.query_start).max() <= chunk


@pytest.mark.parametrize("block_size", [1, 4, 7])
def test_chunk_sizes_do_not_change_tokens(make_rig, block_size):
    prompts = [[(7 * i + n) % 299 for i in range(n)] for n in (1, 5, 13, 29)]
    for chunk in {1, 7, block_size, max(1, block_size - 1), block_size + 1, None}:
        rig = make_rig(block_size=block_size, num_blocks=150, chunk_tokens=chunk)
        requests = [rig.loop.submit(prompt, ALL) for prompt in prompts]
        rig.run_to_end()
        for prompt, request in zip(prompts, requests, strict=True):
            assert list(request.sequence.output_ids) == rig.run_alone(prompt, ALL)


def test_pool_without_room_for_all_preempts_the_last_arrived(make_rig):
    rig = make_rig(block_size=2, num_blocks=9)
    requests = [rig.loop.submit([token, token + 1, token + 2], ALL) for token in (1, 40, 90)]
    rig.run_to_end()
    preemptions = [request.sequence.num_preemptions for request in requests]
    assert preemptions[0] == 0
    assert preemptions[2] > 0
    for request, token in zip(requests, (1, 40, 90), strict=True):
        expected = rig.run_alone([token, token + 1, token + 2], ALL)
        assert list(request.sequence.output_ids) == expected


def test_preempted_sequence_waits_first_in_line_with_its_tokens(make_rig):
    rig = make_rig(block_size=2, num_blocks=7, max_sequences=2)
    first, second, third = (rig.loop.submit([n, n, n, n], ALL) for n in (1, 2, 3))
    while second.sequence.num_preemptions == 0:
        rig.loop.step()
    assert second.sequence.state is State.WAITING
    assert second.sequence.num_computed_tokens == 0
    assert second.sequence.num_output_tokens > 0
    assert list(rig.scheduler.waiting) == [second.sequence, third.sequence]
    assert rig.manager.holders == {first.sequence.id}


def test_sequences_start_in_order_of_arrival(make_rig):
    rig = make_rig(max_step_tokens=3, num_blocks=60, max_sequences=8)
    requests = [rig.loop.submit([n] * 4, ALL) for n in range(6)]
    order = []
    while rig.loop.step():
        order += [r for r in requests if r.ttft_ms is not None and r not in order]
    assert order == requests


def test_long_prompt_does_not_keep_running_sequences_from_moving(make_rig):
    rig = make_rig(max_step_tokens=4)
    decoding = rig.loop.submit([1], SamplingParams(max_tokens=20, ignore_eos=True))
    rig.loop.step()
    prompt = rig.loop.submit([2] * 30, ALL)
    for step in range(5):
        rig.loop.step()
        assert decoding.sequence.num_output_tokens == 2 + step
    assert prompt.sequence.num_computed_tokens == 5 * 3


def test_request_longer_than_the_limit_is_refused_with_both_values(make_rig):
    rig = make_rig(max_sequence_length=20, num_blocks=40)
    with pytest.raises(RequestError, match=r"21 together.*max_sequence_length is 20"):
        rig.loop.submit([1] * 12, ALL)
    rig.loop.submit([1] * 11, ALL)
    rig.run_to_end()


def test_request_larger_than_the_pool_is_refused_with_both_values(make_rig):
    rig = make_rig(block_size=4, num_blocks=4, max_sequence_length=64)
    with pytest.raises(RequestError, match=r"need 4 KV blocks of 4 tokens.*pool has 3"):
        rig.loop.submit([1] * 5, ALL)
    request = rig.loop.submit([1] * 4, ALL)  # 4 + 9 tokens, the last of which isn't computed
    rig.run_to_end()
    assert len(request.sequence.output_ids) == 9


def test_ending_a_sequence_twice_is_refused(make_rig):
    rig = make_rig()
    request = rig.loop.submit([1], ALL)
    rig.loop.cancel(request)
    with pytest.raises(AssertionError, match="ends twice"):
        rig.scheduler.finish(request.sequence)


@pytest.mark.parametrize("damage", ["order", "holder"])
def test_check_finds_damage(make_rig, damage):
    rig = make_rig()
    for n in range(3):
        rig.loop.submit([n], ALL)
    rig.loop.step()
    if damage == "order":
        rig.scheduler.running.reverse()
    else:
        rig.manager.free(rig.scheduler.running[0].id)
    with pytest.raises(AssertionError):
        rig.loop.check()


def test_refusals_name_the_remedy(make_rig):
    rig = make_rig(max_sequence_length=8)
    with pytest.raises(RequestError, match=re.escape("shorten the prompt or lower max_tokens")):
        rig.loop.submit([1], ALL)
