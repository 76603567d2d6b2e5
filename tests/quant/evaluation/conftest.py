"""An executor whose predictions depend on what lies in its KV blocks, with what it needs."""

import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from manifests import whole_rank
from numpy.typing import NDArray
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers

from llmbuild.runtime.batch import StepBatch
from llmbuild.runtime.manifest import (
    ALONE,
    SCHEMA_VERSION,
    File,
    KVLayout,
    Limits,
    Manifest,
)
from llmbuild.runtime.target import CpuTarget
from llmbuild.runtime.tokenizer import GenerationConfig, Tokenizer

VOCAB = 256
EMPTY = -1

Predict = Callable[[list[int]], NDArray[np.float32]]


def logits_after(history: list[int], model: int = 0) -> NDArray[np.float32]:
    """Logits [VOCAB] that depend on every token so far, and on which of several models it is."""
    seed = zlib.crc32(np.array(history, dtype=np.int64).tobytes(), model)
    return 3 * np.random.default_rng(seed).standard_normal(VOCAB).astype(np.float32)


class HistoryExecutor:
    """Writes token ids to KV blocks and predicts from what it reads there."""

    def __init__(
        self, manifest: Manifest, num_blocks: int, predict: Predict = logits_after
    ) -> None:
        self.kv = np.full((num_blocks, manifest.kv.block_size), EMPTY)
        self.limits = manifest.limits
        self.predict = predict
        self.num_rows = 0
        self.num_tokens = 0
        self.num_steps = 0

    def step(self, batch: StepBatch) -> NDArray[np.float32]:
        assert batch.num_tokens <= self.limits.max_step_tokens
        assert batch.num_sequences <= self.limits.max_sequences
        owners = np.repeat(np.arange(batch.num_sequences), np.diff(batch.query_start))
        size = self.kv.shape[1]
        written: set[tuple[int, int]] = set()
        for token, position, owner in zip(batch.token_ids, batch.positions, owners, strict=True):
            place = int(batch.block_tables[owner, position // size]), int(position % size)
            assert place[0] != 0, "the scratch block isn't a sequence's"
            assert place not in written, "two tokens in one place"
            written.add(place)
            self.kv[place] = token
        rows = [self._row(batch, int(row), int(owners[row])) for row in batch.logit_rows]
        self.num_rows += len(rows)
        self.num_tokens += batch.num_tokens
        self.num_steps += 1
        return np.array(rows, dtype=np.float32).reshape(-1, VOCAB)

    def _row(self, batch: StepBatch, row: int, owner: int) -> NDArray[np.float32]:
        size = self.kv.shape[1]
        table, length = batch.block_tables[owner], int(batch.positions[row]) + 1
        history = [int(self.kv[table[p // size], p % size]) for p in range(length)]
        assert EMPTY not in history
        assert length <= batch.kv_lengths[owner] <= self.limits.max_sequence_length
        return self.predict(history)

    def close(self) -> None:
        pass


@pytest.fixture(scope="session")
def history_executor() -> type[HistoryExecutor]:
    return HistoryExecutor


@pytest.fixture(scope="session")
def predict() -> Callable[..., NDArray[np.float32]]:
    """predict(history, model=0): the logits that HistoryExecutor gives."""
    return logits_after


@pytest.fixture(scope="session")
def make_manifest() -> Callable[..., Manifest]:
    """make_manifest(block_size=, max_step_tokens=, max_sequences=, max_sequence_length=)."""

    def make(*, block_size: int = 4, **limits: Any) -> Manifest:
        defaults = {"max_sequence_length": 64, "max_step_tokens": 40, "max_sequences": 3}
        target = CpuTarget(machine="x86_64", isa_levels=[], compiler="", compiler_flags={})
        kv = KVLayout(block_size=block_size, num_kv_heads=1, head_dim=1, layers=[])
        return Manifest(
            schema_version=SCHEMA_VERSION,
            llmbuild_version="0",
            name="history",
            model={},
            vocab_size=VOCAB,
            precision="fp32",
            quantised={},
            target=target,
            limits=Limits(**(defaults | limits)),
            buckets=[1],
            kv=kv,
            parallel=ALONE,
            ranks=[whole_rank(kv, VOCAB)],
            files={"w": File(sha256="", size_bytes=0)},
        )

    return make


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    """One token a byte; it would add BOS if it were allowed to."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Backend(models.BPE({word: i for i, word in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    return Tokenizer(backend, GenerationConfig(0, [1], True))


@pytest.fixture
def text_path(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text("In the beginning was the Wörd, and so on. " * 6, encoding="utf-8")
    return path
