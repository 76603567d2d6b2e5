"""Perplexity against a plain loop over whole windows, with a model that sees its KV content."""

import math
import sys
import zlib
from types import SimpleNamespace

import numpy as np
import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers

from llmbuild.errors import InternalError, RequestError
from llmbuild.quant.evaluate import evaluate_engine, perplexity, plan_steps, sum_nll
from llmbuild.runtime.manifest import File, KVLayer, KVLayout, Limits, Manifest, Rank, Target
from llmbuild.runtime.tokenizer import GenerationConfig, Tokenizer

VOCAB = 256
EMPTY = -1


def logits_after(history):
    """Logits that depend on every token so far."""
    seed = zlib.crc32(np.array(history, dtype=np.int64).tobytes())
    return 3 * np.random.default_rng(seed).standard_normal(VOCAB).astype(np.float32)


class HistoryExecutor:
    """Writes token ids to KV blocks and predicts from what it reads there."""

    def __init__(self, manifest, num_blocks):
        self.kv = np.full((num_blocks, manifest.kv.block_size), EMPTY)
        self.limits = manifest.limits
        self.num_rows = 0
        self.num_steps = 0

    def step(self, batch):
        assert batch.num_tokens <= self.limits.max_step_tokens
        assert batch.num_sequences <= self.limits.max_sequences
        tables = batch.block_tables[batch.block_tables > 0].tolist()
        assert len(tables) == len(set(tables))
        owners = np.repeat(np.arange(batch.num_sequences), np.diff(batch.query_start))
        size = self.kv.shape[1]
        for token, position, owner in zip(batch.token_ids, batch.positions, owners, strict=True):
            self.kv[batch.block_tables[owner, position // size], position % size] = token
        rows = []
        for row in batch.logit_rows:
            table = batch.block_tables[owners[row]]
            places = [(table[p // size], p % size) for p in range(batch.positions[row] + 1)]
            history = [self.kv[place] for place in places]
            assert EMPTY not in history
            rows.append(logits_after(history))
        self.num_rows += len(rows)
        self.num_steps += 1
        return np.array(rows, dtype=np.float32).reshape(-1, VOCAB)

    def close(self):
        pass


def manifest(*, block_size=4, max_step_tokens=40, max_sequences=3, max_sequence_length=64):
    return Manifest(
        schema_version=2,
        llmbuild_version="0",
        name="history",
        model={},
        vocab_size=VOCAB,
        precision="fp32",
        quantised={},
        target=Target(kind="cpu", machine="x86_64", isa_levels=[], compiler="", compiler_flags={}),
        limits=Limits(
            max_sequence_length=max_sequence_length,
            max_step_tokens=max_step_tokens,
            max_sequences=max_sequences,
        ),
        buckets=[1],
        kv=KVLayout(
            block_size=block_size,
            num_kv_heads=1,
            head_dim=1,
            layers=[KVLayer(k_dtype="fp32", v_dtype="fp32")],
        ),
        ranks=[Rank(executables={}, weights="w", arena_bytes=1)],
        files={"w": File(sha256="", size_bytes=0)},
    )


@pytest.fixture(scope="module")
def tokenizer():
    """One token a byte; it would add BOS if it were allowed to."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Backend(models.BPE({word: i for i, word in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    return Tokenizer(backend, GenerationConfig(0, [1], True))


@pytest.fixture
def text_path(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("In the beginning was the Wörd, and so on. " * 6, encoding="utf-8")
    return path


def reference(ids, context, windows):
    """Perplexity by the definition, one window and one position after the other."""
    nll = []
    for window in range(min(windows, len(ids) // context)):
        tokens = ids[window * context : (window + 1) * context]
        for position in range(context // 2 + 1, context):
            logits = [float(x) for x in logits_after(tokens[:position])]
            top = max(logits)
            total = math.fsum(math.exp(x - top) for x in logits)
            nll.append(math.log(total) + top - logits[tokens[position]])
    return math.exp(math.fsum(nll) / len(nll)), len(nll)


@pytest.mark.parametrize("context", [3, 4, 13, 16, 31])
@pytest.mark.parametrize(
    ("max_step_tokens", "max_sequences", "num_blocks"),
    [(40, 3, 40), (1, 1, 9), (7, 2, 20), (200, 5, 40), (29, 4, 9)],
)
def test_perplexity_equals_its_definition(
    tokenizer, text_path, context, max_step_tokens, max_sequences, num_blocks
):
    config = manifest(max_step_tokens=max_step_tokens, max_sequences=max_sequences)
    executor = HistoryExecutor(config, num_blocks)
    result = perplexity(
        executor, tokenizer, config, num_blocks, text_path, context=context, windows=5
    )
    ids = tokenizer.encode(text_path.read_text(encoding="utf-8"), with_bos=False)
    expected, num_scored = reference(ids, context, 5)
    assert result.perplexity == pytest.approx(expected, rel=1e-12)
    assert result.num_scored_tokens == num_scored == executor.num_rows
    assert (result.context, result.windows) == (context, 5)
    assert result.seconds > 0


@pytest.mark.parametrize("max_step_tokens", [5, 29, 200])
def test_engine_gets_just_the_blocks_that_its_fullest_step_needs(
    monkeypatch, tmp_path, tokenizer, text_path, max_step_tokens
):
    config = manifest(max_step_tokens=max_step_tokens, max_sequences=9)
    made = []

    def make_executor(engine, num_blocks, num_threads):
        made.append((HistoryExecutor(config, num_blocks), num_blocks, num_threads))
        return made[-1][0]

    engine = SimpleNamespace(root=tmp_path, manifest=config)
    monkeypatch.setattr("llmbuild.runtime.engine.open_engine", lambda root: engine)
    monkeypatch.setattr("llmbuild.quant.evaluate.load_tokenizer", lambda root: tokenizer)
    module = SimpleNamespace(CpuExecutor=make_executor)
    monkeypatch.setitem(sys.modules, "llmbuild.runtime.executors.cpu", module)
    result = evaluate_engine(tmp_path, text_path, context=13, windows=9, num_threads=3)
    [(executor, num_blocks, num_threads)] = made
    roomy = HistoryExecutor(config, 1000)
    again = perplexity(roomy, tokenizer, config, 1000, text_path, context=13, windows=9)
    assert result.perplexity == pytest.approx(again.perplexity, rel=1e-12)
    assert executor.num_steps == roomy.num_steps
    assert num_blocks <= 9 * 4 + 1
    assert num_threads == 3


def test_window_of_512_scores_255_tokens(tokenizer, tmp_path):
    path = tmp_path / "long.txt"
    path.write_text("abcdefg" * 80)
    config = manifest(max_sequence_length=512, max_step_tokens=512)
    executor = HistoryExecutor(config, 129)
    result = perplexity(executor, tokenizer, config, 129, path, windows=1)
    assert result.num_scored_tokens == 255
    assert executor.num_steps == 1


def test_windows_share_steps():
    steps = list(plan_steps((3, 11), max_step_tokens=20, max_windows=4))
    assert [[(p.window, p.start, p.stop) for p in parts] for parts in steps] == [
        [(0, 0, 10), (1, 0, 10)],
        [(2, 0, 10)],
    ]


def test_short_text_runs_the_windows_it_has_and_says_so(tokenizer, text_path):
    config = manifest()
    executor = HistoryExecutor(config, 40)
    result = perplexity(executor, tokenizer, config, 40, text_path, context=50, windows=64)
    assert result.windows == len(text_path.read_bytes()) // 50


def test_text_without_one_window_is_refused_with_both_numbers(tokenizer, tmp_path):
    path = tmp_path / "short.txt"
    path.write_text("0123456789")
    config = manifest()
    executor = HistoryExecutor(config, 40)
    with pytest.raises(RequestError, match="has 10 tokens; one window needs 11"):
        perplexity(executor, tokenizer, config, 40, path, context=11)


@pytest.mark.parametrize("context", [65, 2, 0, -1])
def test_context_past_the_limit_or_without_a_scored_token_is_refused(tokenizer, text_path, context):
    config = manifest()
    with pytest.raises(RequestError, match=rf"context is {context} .* 3 .* 64"):
        perplexity(HistoryExecutor(config, 40), tokenizer, config, 40, text_path, context=context)


def test_no_windows_are_refused(tokenizer, text_path):
    config = manifest()
    with pytest.raises(RequestError, match="windows is 0"):
        perplexity(
            HistoryExecutor(config, 40), tokenizer, config, 40, text_path, context=9, windows=0
        )


def test_kv_memory_too_small_for_a_window_is_refused(tokenizer, text_path):
    config = manifest()
    with pytest.raises(RequestError, match=r"has 3 usable blocks.* needs 4"):
        perplexity(HistoryExecutor(config, 4), tokenizer, config, 4, text_path, context=13)


@pytest.mark.parametrize("content", [None, b"abc\xff" * 50])
def test_text_that_cannot_be_read_is_refused(tokenizer, tmp_path, content):
    path = tmp_path / "bad.txt"
    if content is not None:
        path.write_bytes(content)
    config = manifest()
    with pytest.raises(RequestError, match=r"bad\.txt (can't be read|isn't UTF-8)"):
        perplexity(HistoryExecutor(config, 40), tokenizer, config, 40, path, context=9)


def test_log_likelihood_is_exact_for_logits_far_apart():
    logits = np.array([[0.0, 80.0, -500.0], [1e4, 1e4, 1e4]], dtype=np.float32)
    expected = 580.0 + math.log1p(math.exp(-80.0)) + math.log(3.0)
    assert sum_nll(logits, np.array([2, 0], np.int32)) == pytest.approx(expected, rel=1e-15)


def test_logits_that_are_not_a_number_are_our_fault(tokenizer, text_path):
    config = manifest()
    executor = HistoryExecutor(config, 40)
    step = executor.step
    executor.step = lambda batch: step(batch) * np.float32(math.nan)
    with pytest.raises(InternalError, match="nan"):
        perplexity(executor, tokenizer, config, 40, text_path, context=9)
