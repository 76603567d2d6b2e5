import gc
import math
import time
import weakref

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmbuild.errors import InternalError, RequestError
from llmbuild.runtime.params import SamplingParams

GREEDY = SamplingParams(max_tokens=12)
INFINITY = math.inf  # seconds of a call: as many steps as can be


def test_tokens_equal_those_of_running_alone(make_rig):
    rig = make_rig(buckets=(1, 4, 8))
    prompts = [[5], [6, 7, 8], list(range(17))]
    requests = [rig.loop.submit(prompt, GREEDY) for prompt in prompts]
    rig.run_to_end()
    for prompt, request in zip(prompts, requests, strict=True):
        alone = rig.run_alone(prompt, GREEDY)
        assert list(request.sequence.output_ids) == alone
        is_eos = alone[-1] in rig.tokenizer.eos_ids
        assert request.finish_reason == ("eos" if is_eos else "length")
        assert request.ttft_ms > 0


def test_every_eos_id_ends_a_request_and_adds_no_text(make_rig):
    rig = make_rig()
    ends = set()
    for first in range(60):
        request = rig.loop.submit([first], SamplingParams(max_tokens=60))
        rig.run_to_end()
        if request.finish_reason == "eos":
            ends.add(request.sequence.tokens[-1])
            assert request.text == rig.tokenizer.decode(request.sequence.output_ids[:-1])
    assert ends == rig.tokenizer.eos_ids
    assert len(ends) == 2


def test_ignore_eos_goes_on_to_max_tokens(make_rig):
    rig = make_rig()
    params = SamplingParams(max_tokens=60, ignore_eos=True)
    request = rig.loop.submit([3], params)
    rig.run_to_end()
    assert request.finish_reason == "length"
    assert len(request.sequence.output_ids) == 60
    assert rig.tokenizer.eos_ids & set(request.sequence.output_ids)


@settings(deadline=None, max_examples=100)
@given(
    first=st.integers(0, 250),
    stop=st.lists(st.integers(0, 20), max_size=3),
    length=st.integers(1, 3),
)
def test_text_ends_before_the_first_stop_string(make_rig, first, stop, length):
    rig = make_rig()
    params = SamplingParams(max_tokens=20)
    alone = rig.run_alone([first], params)
    is_eos = alone[-1] in rig.tokenizer.eos_ids
    full = rig.tokenizer.decode(alone[:-1] if is_eos else alone)
    stops = tuple(full[at : at + length] for at in stop if full[at : at + length])
    request = rig.loop.submit([first], SamplingParams(max_tokens=20, stop=stops))
    rig.run_to_end()
    ends = [(full.index(s) + len(s), full.index(s)) for s in stops]
    assert request.text == (full[: min(ends)[1]] if ends else full)
    assert (request.finish_reason == "stop") == bool(ends)
    assert list(request.sequence.output_ids) == alone[: request.sequence.num_output_tokens]


def test_chunks_join_to_the_completion(make_rig):
    rig = make_rig()
    request = rig.loop.submit([9], SamplingParams(max_tokens=40, ignore_eos=True, stop=("zq",)))
    rig.run_to_end()
    chunks = list(request.chunks)
    assert "".join(chunk.text for chunk in chunks) == request.text
    assert sum((chunk.token_ids for chunk in chunks), ()) == request.sequence.output_ids
    assert [chunk.finish_reason for chunk in chunks] == [None] * (len(chunks) - 1) + ["length"]


def test_draws_do_not_depend_on_batch_mates(make_rig):
    params = SamplingParams(max_tokens=15, temperature=1.3, top_k=50, top_p=0.9, seed=4)
    for mates in (0, 1, 6):
        rig = make_rig(num_blocks=20)
        for mate in range(mates):
            rig.loop.submit([mate], SamplingParams(max_tokens=10, temperature=1.0, seed=mate))
        request = rig.loop.submit([200, 201], params)
        rig.run_to_end()
        assert list(request.sequence.output_ids) == rig.run_alone([200, 201], params)


def test_requests_without_a_seed_differ(make_rig):
    rig = make_rig()
    params = SamplingParams(max_tokens=30, temperature=1.0, ignore_eos=True)
    first, second = (rig.loop.submit([1], params) for _ in range(2))
    rig.run_to_end()
    assert first.sequence.output_ids != second.sequence.output_ids


@pytest.mark.parametrize("num_steps", [0, 1, 3])
def test_cancelled_request_frees_its_blocks_once(make_rig, num_steps):
    rig = make_rig()
    request = rig.loop.submit([1, 2, 3], SamplingParams(max_tokens=20, ignore_eos=True))
    for _ in range(num_steps):
        rig.loop.step()
    rig.loop.cancel(request)
    rig.loop.check()
    assert rig.manager.pool.num_free == 39
    assert request.finish_reason == "cancelled"
    assert request.chunks[-1].finish_reason == "cancelled"
    assert len(request.sequence.output_ids) == num_steps
    rig.loop.cancel(request)
    assert rig.manager.pool.num_free == 39
    assert not rig.loop.step()


def test_cancel_during_a_step_takes_effect_after_it(make_rig):
    rig = make_rig()
    params = SamplingParams(max_tokens=5, ignore_eos=True)
    request, other = (rig.loop.submit([n], params) for n in (1, 2))
    rig.loop.step()
    rig.executor.before_step = lambda: rig.loop.cancel(request)
    rig.loop.step()
    rig.loop.check()
    assert request.finish_reason == "cancelled"
    rig.run_to_end()
    assert list(other.sequence.output_ids) == rig.run_alone([2], params)
    assert rig.manager.pool.num_free == 39


@pytest.mark.parametrize("error", [RuntimeError("broken"), KeyboardInterrupt()])
def test_failed_step_ends_all_requests_and_is_raised(make_rig, error):
    rig = make_rig(max_sequences=2)
    requests = [rig.loop.submit([n] * 3, GREEDY) for n in range(1, 4)]
    rig.loop.step()
    rig.executor.fail_with = error
    with pytest.raises(type(error)):
        rig.loop.step()
    rig.loop.check()
    assert rig.loop.num_live == 0
    assert rig.manager.pool.num_free == 39
    for request in requests:
        assert request.finish_reason == "error"
        assert request.error == (str(error) or "KeyboardInterrupt")
        assert request.chunks[-1].finish_reason == "error"


@pytest.mark.parametrize("where", ["allocate", "free"])
@pytest.mark.parametrize("after", [0, 1, 2])
def test_interrupt_amid_the_bookkeeping_leaves_a_sound_loop(make_rig, monkeypatch, where, after):
    rig = make_rig(max_sequences=2)
    requests = [rig.loop.submit([n] * 5, SamplingParams(max_tokens=n)) for n in range(1, 4)]
    original, calls = getattr(rig.manager.pool, where), []

    def interrupted(*arguments):
        calls.append(original(*arguments))
        if len(calls) > after:
            raise KeyboardInterrupt
        return calls[-1]

    monkeypatch.setattr(rig.manager.pool, where, interrupted)
    with pytest.raises(KeyboardInterrupt):
        rig.run_to_end()
    monkeypatch.undo()
    rig.loop.check()
    assert rig.loop.num_live == 0
    assert rig.manager.pool.num_free == 39
    assert all(request.finish_reason is not None for request in requests)
    request = rig.loop.submit([1], GREEDY)
    rig.run_to_end()
    assert list(request.sequence.output_ids) == rig.run_alone([1], GREEDY)


def test_loop_serves_new_requests_after_a_failed_step(make_rig):
    rig = make_rig()
    rig.loop.submit([1], GREEDY)
    rig.executor.fail_with = RuntimeError("broken")
    with pytest.raises(RuntimeError):
        rig.loop.step()
    rig.executor.fail_with = None
    request = rig.loop.submit([1], GREEDY)
    rig.run_to_end()
    assert list(request.sequence.output_ids) == rig.run_alone([1], GREEDY)


def test_logits_that_are_not_a_number_end_the_requests_with_an_error(make_rig):
    rig = make_rig()
    step = rig.executor.step
    rig.executor.step = lambda batch: step(batch) * np.float32(math.nan)
    request = rig.loop.submit([1], GREEDY)
    with pytest.raises(InternalError, match="logit of token 0 isn't a finite number"):
        rig.loop.step()
    rig.loop.check()
    assert request.finish_reason == "error"


@pytest.mark.parametrize(
    "prompt", [[], [300], [-1], [1, 2**40], [1.0], ["a"], [True], [None], [np.int32(300)]]
)
def test_prompt_that_is_no_list_of_token_ids_is_refused(make_rig, prompt):
    rig = make_rig()
    with pytest.raises(RequestError, match="prompt"):
        rig.loop.submit(prompt, GREEDY)
    rig.loop.check()
    assert rig.loop.num_live == 0


def test_bad_parameters_are_refused_at_submission_while_others_go_on(make_rig):
    rig = make_rig()
    request = rig.loop.submit([1], GREEDY)
    for bad in (SamplingParams(max_tokens=0), SamplingParams(temperature=math.nan)):
        with pytest.raises(RequestError):
            rig.loop.submit([1], bad)
    rig.run_to_end()
    assert list(request.sequence.output_ids) == rig.run_alone([1], GREEDY)


def test_padded_rows_are_cut(make_rig):
    rig = make_rig(buckets=(8,))
    requests = [rig.loop.submit([n], GREEDY) for n in (1, 2, 3)]
    rig.run_to_end()
    assert {batch.num_sequences for batch in rig.executor.batches} == {8}
    for n, request in zip((1, 2, 3), requests, strict=True):
        assert list(request.sequence.output_ids) == rig.run_alone([n], GREEDY)


def test_ended_requests_are_not_kept(make_rig):
    rig = make_rig()
    request = rig.loop.submit([1], GREEDY)
    output = weakref.ref(request.output)
    rig.run_to_end()
    del request
    gc.collect()
    assert output() is None


def outcome(request):
    return list(request.sequence.output_ids), request.text, request.finish_reason


@pytest.mark.parametrize("buckets", [(), (1, 4, 8)])
def test_steps_in_one_call_give_the_tokens_of_single_steps(make_rig, buckets):
    prompts = [[5], [6, 7, 8], list(range(17)), [9] * 5, [40, 2]]
    params = [SamplingParams(max_tokens=n, ignore_eos=True) for n in (1, 30, 13, 22, 8)]
    outcomes = []
    for call_s in (0.0, INFINITY):
        rig = make_rig(buckets=buckets, num_blocks=100, call_s=call_s)
        requests = [rig.loop.submit(*each) for each in zip(prompts, params, strict=True)]
        rig.run_to_end()
        outcomes.append([outcome(request) for request in requests])
        for prompt, own, request in zip(prompts, params, requests, strict=True):
            assert list(request.sequence.output_ids) == rig.run_alone(prompt, own)
        assert max(rig.executor.calls) == (8 if call_s else 1)
    assert outcomes[0] == outcomes[1]


def test_what_is_computed_past_an_eos_is_dropped(make_rig):
    rig = make_rig(call_s=INFINITY)
    places = set()
    for first in range(60):
        params = SamplingParams(max_tokens=60)
        request = rig.loop.submit([first], params)
        rig.run_to_end()
        alone = rig.run_alone([first], params)
        assert list(request.sequence.output_ids) == alone
        assert sum((chunk.token_ids for chunk in request.chunks), ()) == tuple(alone)
        assert rig.manager.pool.num_free == 39
        if request.finish_reason == "eos":
            assert request.text == rig.tokenizer.decode(alone[:-1])
            places.add(len(request.chunks[-1].token_ids))
    assert places - {1, 8}, "no EOS came within a call"


@settings(deadline=None, max_examples=60)
@given(first=st.integers(0, 250), at=st.integers(0, 20), length=st.integers(1, 3))
def test_stop_string_within_a_call_ends_as_in_single_steps(make_rig, first, at, length):
    params = SamplingParams(max_tokens=25, ignore_eos=True)
    outcomes = []
    full = None
    for call_s in (0.0, INFINITY):
        rig = make_rig(call_s=call_s)
        if full is None:
            full = rig.tokenizer.decode(rig.run_alone([first], params))
        stop = (full[at : at + length],) if full[at : at + length] else ()
        mate = rig.loop.submit([first + 1], params)
        own = SamplingParams(max_tokens=25, ignore_eos=True, stop=stop)
        request = rig.loop.submit([first], own)
        rig.run_to_end()
        outcomes.append((outcome(request), outcome(mate)))
    assert outcomes[0] == outcomes[1]


def test_no_call_goes_past_the_first_max_tokens(make_rig):
    rig = make_rig(call_s=INFINITY)
    for count in (4, 20):
        rig.loop.submit([count], SamplingParams(max_tokens=count, ignore_eos=True))
    rig.run_to_end()
    # The prompts and the first tokens; 3 that both want; then 16 that are left of the longer.
    assert rig.executor.calls == [1, 3, 8, 8]


def test_call_takes_no_more_steps_than_there_are_blocks_for(make_rig):
    rig = make_rig(block_size=2, num_blocks=6, call_s=INFINITY)
    params = SamplingParams(max_tokens=8, ignore_eos=True)
    requests = [rig.loop.submit([n, n], params) for n in (1, 2)]
    rig.run_to_end()
    assert 1 < max(rig.executor.calls) < 7
    assert [list(r.sequence.output_ids) for r in requests] == [
        rig.run_alone([n, n], params) for n in (1, 2)
    ]


def test_a_sampled_mate_keeps_steps_single(make_rig):
    rig = make_rig(call_s=INFINITY)
    greedy = SamplingParams(max_tokens=12, ignore_eos=True)
    drawn = SamplingParams(max_tokens=12, ignore_eos=True, temperature=1.0, seed=3)
    requests = [rig.loop.submit([n], p) for n, p in ((1, greedy), (2, drawn))]
    rig.run_to_end()
    assert rig.executor.calls == []
    assert list(requests[0].sequence.output_ids) == rig.run_alone([1], greedy)
    assert list(requests[1].sequence.output_ids) == rig.run_alone([2], drawn)


def test_cancel_within_a_call_takes_effect_after_it(make_rig):
    rig = make_rig(call_s=INFINITY)
    params = SamplingParams(max_tokens=30, ignore_eos=True)
    request, other = (rig.loop.submit([n], params) for n in (1, 2))
    rig.loop.step()
    rig.executor.before_step = lambda: rig.loop.cancel(request)
    rig.loop.step()
    rig.loop.check()
    assert request.finish_reason == "cancelled"
    assert list(request.sequence.output_ids) == rig.run_alone([1], params)[:9]
    rig.run_to_end()
    assert list(other.sequence.output_ids) == rig.run_alone([2], params)
    assert rig.manager.pool.num_free == 39


def test_request_that_comes_between_calls_is_admitted_by_the_next(make_rig):
    rig = make_rig(call_s=INFINITY)
    params = SamplingParams(max_tokens=30, ignore_eos=True)
    rig.loop.submit([1], params)
    rig.loop.step()
    rig.loop.step()
    late = rig.loop.submit([2, 3], params)
    rig.loop.step()
    assert late.sequence.num_output_tokens == 1
    assert rig.executor.calls == [1, 8, 1]


def test_bad_logit_within_a_call_ends_the_requests_with_an_error(make_rig):
    rig = make_rig(call_s=INFINITY)
    step = rig.executor.step

    def spoil_after_some(batch):
        return step(batch) * np.float32(math.nan if len(rig.executor.batches) > 4 else 1)

    rig.executor.step = spoil_after_some
    params = SamplingParams(max_tokens=30, ignore_eos=True)
    request = rig.loop.submit([1], params)
    rig.loop.step()
    with pytest.raises(InternalError, match="isn't a finite number"):
        rig.loop.step()
    rig.loop.check()
    assert request.finish_reason == "error"
    assert rig.manager.pool.num_free == 39


def test_steps_of_a_call_become_fewer_as_they_take_longer(make_rig):
    rig = make_rig(call_s=0.05)
    rig.loop.submit([1], SamplingParams(max_tokens=40, ignore_eos=True))
    rig.executor.before_step = lambda: time.sleep(0.02)
    rig.run_to_end()
    assert max(rig.executor.calls) <= 2
