"""`LLM` over the fake executor: what is checked is all between the caller and the step."""

import gc
import json
import sys
import threading
import time
from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import pytest
from manifests import whole_rank

from llmbuild.errors import RequestError, UserError
from llmbuild.runtime.api import LLM
from llmbuild.runtime.loop import MAX_STEPS
from llmbuild.runtime.manifest import (
    ALONE,
    SCHEMA_VERSION,
    File,
    KVLayer,
    KVLayout,
    Limits,
    Manifest,
)
from llmbuild.runtime.params import SamplingParams
from llmbuild.runtime.target import CpuTarget

VOCAB = 300
BLOCK_SIZE = 4
BLOCK_BYTES = 4 * 3 * 2 * (4 + 4)  # positions x heads x head_dim x (K + V)

KV = KVLayout(
    block_size=BLOCK_SIZE,
    num_kv_heads=3,
    head_dim=2,
    layers=[KVLayer.of_heads([("fp32", "fp32")] * 3)],
)
MANIFEST = Manifest(
    schema_version=SCHEMA_VERSION,
    llmbuild_version="0",
    name="fake",
    model={},
    vocab_size=VOCAB,
    precision="fp32",
    quantised={},
    target=CpuTarget(machine="x86_64", isa_levels=[], compiler="", compiler_flags={}),
    limits=Limits(max_sequence_length=48, max_step_tokens=16, max_sequences=3),
    buckets=[1, 2, 4],
    kv=KV,
    parallel=ALONE,
    ranks=[whole_rank(KV, VOCAB)],
    files={"w": File(sha256="", size_bytes=0)},
)
GREEDY = SamplingParams(max_tokens=20)
LONG = SamplingParams(max_tokens=30, ignore_eos=True)


@pytest.fixture
def engine_dir(tmp_path, byte_level):
    byte_level._backend.save(str(tmp_path / "tokenizer.json"))
    ids = [byte_level._backend.token_to_id(t) for t in ("<|begin|>", "<|end|>", "<|stop|>")]
    config = {"bos_token_id": ids[0], "eos_token_id": ids[1:], "add_bos": True}
    (tmp_path / "generation_config.json").write_text(json.dumps(config))
    (tmp_path / "chat_template.jinja").write_text(
        "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    )
    return tmp_path


@pytest.fixture
def open_llm(monkeypatch, engine_dir, make_rig, byte_level):
    """Opens an LLM whose engine and executor are fakes; all are closed at the end."""
    made = []

    def executor(engine, num_blocks, num_threads, pin_threads):
        assert num_threads >= 1
        assert pin_threads in (True, False)
        rig = make_rig(num_blocks=num_blocks, block_size=BLOCK_SIZE, vocab_size=VOCAB)
        return rig.executor

    def opening_engine(root):
        return nullcontext(SimpleNamespace(root=root, manifest=MANIFEST))

    def open_(**options):
        made.append(LLM(engine_dir, **options))
        return made[-1]

    monkeypatch.setattr("llmbuild.runtime.engine.opening_engine", opening_engine)
    module = SimpleNamespace(CpuExecutor=executor)
    monkeypatch.setitem(sys.modules, "llmbuild.runtime.executors.cpu", module)
    yield open_
    for llm in made:
        llm.close()


@pytest.fixture
def llm(open_llm):
    return open_llm()


@pytest.fixture
def alone(make_rig):
    """Output tokens of the fake model for a prompt run by itself."""
    return make_rig(vocab_size=VOCAB).run_alone


def num_free(llm):
    return llm._loop._scheduler.manager.pool.num_free


def test_text_is_completed_with_bos_before_it(llm, byte_level, alone):
    completion = llm.generate("hello", GREEDY)
    prompt = [byte_level._backend.token_to_id("<|begin|>"), *byte_level.encode("hello")]
    assert completion.prompt_token_ids == tuple(prompt)
    assert list(completion.token_ids) == alone(prompt, GREEDY)
    assert completion.finish_reason in ("eos", "length")
    assert completion.error is None
    assert completion.ttft_ms > 0
    llm.check()


def test_token_ids_are_completed_as_they_are(llm, alone):
    completion = llm.generate([7, 8, 9], GREEDY)
    assert completion.prompt_token_ids == (7, 8, 9)
    assert list(completion.token_ids) == alone([7, 8, 9], GREEDY)


def test_list_of_prompts_gives_one_completion_each_in_order(llm, alone):
    prompts = [[n, n + 1] for n in range(0, 70, 7)]
    completions = llm.generate(prompts, GREEDY)
    for prompt, completion in zip(prompts, completions, strict=True):
        assert completion.prompt_token_ids == tuple(prompt)
        assert list(completion.token_ids) == alone(prompt, GREEDY)
    assert num_free(llm) == llm.num_blocks - 1


def test_each_prompt_can_have_its_own_parameters(llm, alone):
    params = [
        SamplingParams(max_tokens=3),
        SamplingParams(max_tokens=9, temperature=1.0, seed=2),
        SamplingParams(max_tokens=1),
    ]
    completions = llm.generate([[1], [2], [3]], params)
    for first, own, completion in zip((1, 2, 3), params, completions, strict=True):
        assert list(completion.token_ids) == alone([first], own)


def test_no_prompts_give_no_completions(llm):
    assert llm.generate([]) == []


def test_refused_prompt_of_a_list_lets_the_others_go_on(llm, alone):
    bad = SamplingParams(max_tokens=0)
    hot = SamplingParams(temperature=float("nan"))
    prompts = [[1], [], [2] * 47, [3], [4], [VOCAB], "x" * 100, 5, {"role": "user"}, [6]]
    params = [GREEDY, GREEDY, GREEDY, bad, hot, *[GREEDY] * 5]
    completions = llm.generate(prompts, params)
    reasons = [completion.finish_reason == "refused" for completion in completions]
    assert reasons == [False, True, True, True, True, True, True, True, True, False]
    assert "max_sequence_length is 48" in completions[2].error
    assert completions[3].error.startswith("max_tokens is 0")
    assert completions[4].error.startswith("temperature is nan")
    assert list(completions[0].token_ids) == alone([1], GREEDY)
    assert list(completions[9].token_ids) == alone([6], GREEDY)


@pytest.mark.parametrize(
    ("prompt", "params"),
    [
        ("x" * 48, GREEDY),
        ("hi", SamplingParams(max_tokens=0)),
        ("hi", [GREEDY]),
        ("hi", 5),
        ([[1]], 5),
        ([[1], [2]], [GREEDY]),
        (7, None),
        (None, None),
        ("\ud800", None),
        ([VOCAB], None),
        (np.zeros(3), None),
    ],
)
def test_request_that_cannot_be_used_raises(llm, prompt, params):
    with pytest.raises(RequestError):
        llm.generate(prompt, params)
    llm.check()
    assert num_free(llm) == llm.num_blocks - 1


def test_chat_renders_the_template_and_adds_no_bos(llm, byte_level, alone):
    messages = [{"role": "user", "content": "hello"}]
    completion = llm.chat(messages, GREEDY)
    prompt = byte_level.encode("[user]hello")
    assert completion.prompt_token_ids == tuple(prompt)
    assert list(completion.token_ids) == alone(prompt, GREEDY)


def test_malformed_chat_raises(llm):
    with pytest.raises(RequestError, match="at least one message"):
        llm.chat([])


def test_stream_joins_to_the_completion(llm):
    whole = llm.generate([5, 6], LONG)
    stream = llm.stream([5, 6], LONG)
    assert stream.completion is None
    chunks = list(stream)
    assert "".join(chunk.text for chunk in chunks) == whole.text
    assert sum((chunk.token_ids for chunk in chunks), ()) == whole.token_ids
    assert chunks[-1].finish_reason == "length"
    assert stream.completion.token_ids == whole.token_ids


def test_streams_of_one_thread_interleave(llm, alone):
    streams = {first: llm.stream([first], LONG) for first in (1, 2, 3, 4, 5)}
    tokens = {first: [] for first in streams}
    unread = dict(streams)
    while unread:
        for first, stream in list(unread.items()):
            chunk = next(stream, None)
            if chunk is None:
                del unread[first]
            else:
                tokens[first] += chunk.token_ids
        llm.check()
    assert tokens == {first: alone([first], LONG) for first in streams}


@pytest.mark.parametrize("how", ["close", "with", "drop"])
@pytest.mark.parametrize("num_read", [0, 1, 4])
def test_stream_left_early_frees_its_blocks(llm, how, num_read):
    stream = llm.stream([1, 2, 3], LONG)
    for _ in range(num_read):
        next(stream)
    if how == "close":
        stream.close()
        assert next(stream, None) is None
        assert stream.completion.finish_reason == "cancelled"
    elif how == "with":
        with stream:
            pass
    else:
        del stream
        gc.collect()
    llm.check()
    assert num_free(llm) == llm.num_blocks - 1
    assert llm._loop.num_live == 0


def test_stream_dropped_during_a_step_leaves_the_others_right(llm, alone):
    dropped = [llm.stream([1], LONG)]
    kept = llm.stream([2], LONG)
    next(kept)
    llm._executor.before_step = dropped.clear
    tokens = [token for chunk in kept for token in chunk.token_ids]
    assert [*kept.completion.token_ids] == alone([2], LONG)
    assert len(tokens) == 29
    assert num_free(llm) == llm.num_blocks - 1


def test_refused_stream_raises_when_it_is_opened(llm):
    with pytest.raises(RequestError, match="prompt is empty"):
        llm.stream([], GREEDY)


def test_threads_share_the_engine(llm, alone):
    results = {}

    def work(first):
        if first % 2:
            results[first] = list(llm.generate([first], LONG).token_ids)
        else:
            results[first] = [t for chunk in llm.stream([first], LONG) for t in chunk.token_ids]

    threads = [threading.Thread(target=work, args=(first,)) for first in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
    assert results == {first: alone([first], LONG) for first in range(8)}
    llm.check()
    assert num_free(llm) == llm.num_blocks - 1


def test_request_of_another_thread_waits_for_no_more_than_the_call_that_runs(llm):
    """One thread drives steps without a pause; its lock would be its own for long otherwise."""
    llm._executor.before_step = lambda: time.sleep(0.002)
    driver = threading.Thread(target=llm.generate, args=([1], LONG))
    driver.start()
    while not llm._executor.batches:
        time.sleep(0.001)
    before = len(llm._executor.batches)
    stream = llm.stream([2], SamplingParams(max_tokens=1))
    assert len(llm._executor.batches) - before <= 2 * MAX_STEPS
    assert driver.is_alive()
    stream.close()
    driver.join(timeout=30)


def test_failed_step_raises_where_it_was_driven_and_ends_the_others(llm):
    first, second = llm.stream([1], LONG), llm.stream([2], LONG)
    next(first)
    llm._executor.fail_with = RuntimeError("broken")
    with pytest.raises(RuntimeError, match="broken"):
        next(first)
    last = list(second)[-1]
    assert last.finish_reason == "error"
    assert second.completion.error == "broken"
    assert num_free(llm) == llm.num_blocks - 1


def test_interrupted_generate_leaves_no_request_behind(llm):
    llm._executor.fail_with = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        llm.generate([[1], [2]], LONG)
    llm.check()
    assert llm._loop.num_live == 0


def test_small_pool_preempts_and_reports_it(open_llm, alone):
    llm = open_llm(num_blocks=12)
    completions = llm.generate([[1], [2], [3]], LONG)
    assert sum(completion.num_preemptions for completion in completions) > 0
    for first, completion in zip((1, 2, 3), completions, strict=True):
        assert list(completion.token_ids) == alone([first], LONG)


def test_chunk_size_does_not_change_tokens(open_llm, alone):
    prompt = list(range(15))
    for chunk_tokens in (1, 3, 4, 5, 100):
        llm = open_llm(chunk_tokens=chunk_tokens)
        assert list(llm.generate(prompt, GREEDY).token_ids) == alone(prompt, GREEDY)


def test_kv_bytes_state_the_memory(open_llm):
    assert open_llm(num_blocks=5).kv_bytes == 5 * BLOCK_BYTES
    assert open_llm(kv_memory="2KiB").kv_bytes == 2048 // BLOCK_BYTES * BLOCK_BYTES
    assert open_llm().num_blocks == 3 * 12 + 1


@pytest.mark.parametrize(
    "options",
    [
        {"kv_memory": "1MiB", "num_blocks": 4},
        {"kv_memory": "lots"},
        {"num_threads": 0},
        {"num_threads": 1.5},
        {"pin_threads": 1},
        {"chunk_tokens": 0},
        {"rank_timeout_s": 0},
        {"rank_timeout_s": float("nan")},
        {"rank_timeout_s": "60"},
    ],
)
def test_bad_option_is_refused(open_llm, options):
    with pytest.raises(UserError):
        open_llm(**options)


def test_closed_llm_gives_its_memory_back_and_refuses_requests(open_llm):
    with open_llm() as llm:
        stream = llm.stream([1], LONG)
        next(stream)
    assert llm._executor.is_closed
    assert list(stream)[-1].finish_reason == "cancelled"
    assert num_free(llm) == llm.num_blocks - 1
    with pytest.raises(UserError, match="closed"):
        llm.generate("hello")
    llm.close()
