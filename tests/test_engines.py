"""Whole path: a saved model, compiled and run, against transformers and against itself."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from llmbuild import LLM, SamplingParams
from llmbuild.runtime.batch import StepBatch
from llmbuild.runtime.bucket import pad_to_bucket
from llmbuild.runtime.engine import open_engine
from llmbuild.runtime.executors.cpu import CpuExecutor
from llmbuild.runtime.manifest import KVLayout

TOLERANCE = 1e-4  # of the largest logit
BLOCK_SIZE = 4  # compile_engine's

LINEAR = {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.5}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5e3,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8,
}
GROUPS_OF_1 = {"num_attention_heads": 3, "num_key_value_heads": 3}
GROUPS_OF_4 = {"num_attention_heads": 8, "num_key_value_heads": 2}
ONE_GROUP = {"num_attention_heads": 5, "num_key_value_heads": 1}

VARIANTS = [
    pytest.param("llama", {"rope_parameters": LLAMA3}, id="llama, llama3, groups of 3"),
    pytest.param(
        "llama",
        {"rope_parameters": LINEAR, "tie_word_embeddings": True, "attention_bias": True}
        | ONE_GROUP,
        id="llama, linear, tied, biases, one group",
    ),
    pytest.param("mistral", {"sliding_window": 5} | GROUPS_OF_4, id="mistral, window, groups of 4"),
    pytest.param(
        "qwen2", {"head_dim": 10, "vocab_size": 89} | GROUPS_OF_1, id="qwen2, groups of 1"
    ),
    pytest.param(
        "qwen3",
        {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1} | GROUPS_OF_4,
        id="qwen3, window in one layer, groups of 4",
    ),
]


def prefill(tokens: Sequence[int], start: int, stop: int, table: Sequence[int]) -> StepBatch:
    """Tokens [start, stop) of one sequence, all logits wanted."""
    return StepBatch(
        token_ids=np.array(tokens[start:stop], np.int32),
        positions=np.arange(start, stop, dtype=np.int32),
        query_start=np.array([0, stop - start], np.int32),
        kv_lengths=np.array([stop], np.int32),
        block_tables=np.array([table], np.int32),
        logit_rows=np.arange(stop - start, dtype=np.int32),
    )


@pytest.fixture
def llama(hf_model: Callable[..., Any], compile_engine: Callable[..., Path]) -> tuple[Any, Path]:
    saved = hf_model("llama")
    return saved, compile_engine(saved)


@pytest.mark.parametrize(("model_type", "overrides"), VARIANTS)
def test_logits_of_the_compiled_engine_equal_transformers(
    hf_model: Callable[..., Any],
    compile_engine: Callable[..., Path],
    model_type: str,
    overrides: dict[str, Any],
) -> None:
    saved = hf_model(model_type, **overrides)
    engine = open_engine(compile_engine(saved))
    tokens = np.random.default_rng(3).integers(0, saved.config["vocab_size"], 31).tolist()
    with torch.no_grad():
        expected = saved.model(torch.tensor([tokens])).logits[0].numpy()
    table = [7, 2, 9, 4, 1, 8, 3, 5]
    with closing(CpuExecutor(engine, num_blocks=10, num_threads=2)) as executor:
        got = [  # a prefill in two chunks, then decode
            executor.step(prefill(tokens, start, stop, table))
            for start, stop in ((0, 17), (17, 24), *((n, n + 1) for n in range(24, 31)))
        ]
    difference = np.abs(np.concatenate(got) - expected).max(axis=1)
    assert (difference <= TOLERANCE * np.abs(expected).max(axis=1)).all()


def test_every_chunk_size_gives_the_tokens_of_transformers(llama: tuple[Any, Path]) -> None:
    saved, engine = llama
    prompts = [np.random.default_rng(n).integers(1, 97, n).tolist() for n in (13, 17, 3)]
    expected = [_transformers_greedy(saved.model, prompt, 12) for prompt in prompts]
    for chunk_tokens in (1, 7, BLOCK_SIZE - 1, BLOCK_SIZE, BLOCK_SIZE + 1, None):
        with LLM(engine, num_blocks=30, chunk_tokens=chunk_tokens, num_threads=2) as llm:
            completions = llm.generate(prompts, SamplingParams(max_tokens=12, ignore_eos=True))
        assert [list(c.token_ids) for c in completions] == expected, chunk_tokens


def test_preempted_requests_give_the_tokens_that_they_give_alone(llama: tuple[Any, Path]) -> None:
    _, engine = llama
    prompts = [np.random.default_rng(n).integers(1, 97, 2 + n % 9).tolist() for n in range(9)]
    params = SamplingParams(max_tokens=20, ignore_eos=True)
    with LLM(engine, num_blocks=30, num_threads=1) as llm:
        alone = [llm.generate(prompt, params).token_ids for prompt in prompts]
    with LLM(engine, num_blocks=13, num_threads=2) as llm:
        together = llm.generate(prompts, params)
        llm.check()
    assert [completion.token_ids for completion in together] == alone
    assert sum(completion.num_preemptions for completion in together) > 0


def test_five_sequences_in_a_bucket_of_eight_change_only_their_own_slots(
    llama: tuple[Any, Path],
) -> None:
    engine = open_engine(llama[1])
    kv, rng = engine.manifest.kv, np.random.default_rng(5)
    lengths = [3, 4, 5, 1, 7]
    tables = [[11, 3], [6, 9], [2, 12], [5, 1], [8, 4]]
    with closing(CpuExecutor(engine, num_blocks=14, num_threads=2)) as executor:
        for length, table in zip(lengths, tables, strict=True):
            executor.step(prefill(rng.integers(0, 97, length).tolist(), 0, length, table))
        executor._kv[:] = rng.integers(0, 120, len(executor._kv))  # so that any write shows
        before = executor._kv.copy()
        batch = StepBatch(
            token_ids=rng.integers(0, 97, 5).astype(np.int32),
            positions=np.array(lengths, np.int32),
            query_start=np.arange(6, dtype=np.int32),
            kv_lengths=np.array(lengths, np.int32) + 1,
            block_tables=np.array(tables, np.int32),
            logit_rows=np.arange(5, dtype=np.int32),
        )
        padded = pad_to_bucket(batch, engine.manifest.buckets)
        assert padded.num_sequences == 8
        executor.step(padded)
        changed = set(_changed_slots(before, executor._kv, kv, num_blocks=14))
    own = {
        (table[length // BLOCK_SIZE], length % BLOCK_SIZE)
        for length, table in zip(lengths, tables, strict=True)
    }
    assert changed == own | {(0, 0)}


def _changed_slots(
    before: np.ndarray, after: np.ndarray, kv: KVLayout, num_blocks: int
) -> Iterator[tuple[int, int]]:
    """(block, offset) of every slot in which any layer's K or V changed; fp32, blocks of 4."""
    shape = (len(kv.layers), 2, num_blocks, kv.num_kv_heads, kv.block_size * kv.head_dim, 4)
    k, v = (before != after).reshape(shape).any(axis=(0, 5))
    keys = k.reshape(*shape[2:4], kv.head_dim, kv.block_size).any(axis=(1, 2))
    values = v.reshape(*shape[2:4], kv.block_size, kv.head_dim).any(axis=(1, 3))
    yield from ((int(block), int(offset)) for block, offset in np.argwhere(keys | values))


def _transformers_greedy(model: Any, prompt: list[int], count: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        with torch.no_grad():
            tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
    return tokens[len(prompt) :]


@pytest.mark.parametrize("block_size", [4, 16])
def test_an_engine_with_int8_kv_gives_the_same_bits_in_any_chunks(
    hf_model: Callable[..., Any], compile_engine: Callable[..., Path], block_size: int
) -> None:
    saved = hf_model("llama", head_dim=16)
    engine = open_engine(
        compile_engine(saved, "kv_cache.dtype=int8", f"kv_cache.block_size={block_size}")
    )
    kv = engine.manifest.kv
    token_bytes = kv.num_kv_heads * (kv.head_dim + 4)  # codes, and a scale for each head
    assert kv.block_bytes == 2 * 2 * block_size * token_bytes  # two layers, K and V
    tokens = np.random.default_rng(3).integers(0, saved.config["vocab_size"], 24).tolist()
    with torch.no_grad():
        expected = saved.model(torch.tensor([tokens])).logits[0].numpy()
    table = [7, 2, 9, 4, 1, 8]
    logits = []
    for ends in ([24], [17, 24], range(1, 25)):
        starts = [0, *ends[:-1]]
        with closing(CpuExecutor(engine, num_blocks=10, num_threads=2)) as executor:
            steps = zip(starts, ends, strict=True)
            got = [executor.step(prefill(tokens, *step, table)) for step in steps]
        logits.append(np.concatenate(got))
    assert (logits[1] == logits[0]).all()
    assert (logits[2] == logits[0]).all()
    difference = np.abs(logits[0] - expected).max(axis=1) / np.abs(expected).max(axis=1)
    assert 1e-4 < difference.max() < 0.05  # it is rounded, and close
