"""A fake executor whose tokens depend on all KV content, and small real tokenizers."""

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import pytest
from numpy.typing import NDArray
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend

from llmbuild.runtime.batch import StepBatch
from llmbuild.runtime.kv.manager import KVManager
from llmbuild.runtime.kv.pool import BlockPool
from llmbuild.runtime.loop import Loop
from llmbuild.runtime.manifest import Limits
from llmbuild.runtime.params import SamplingParams
from llmbuild.runtime.sampling import make_rng, sample
from llmbuild.runtime.scheduler import Scheduler
from llmbuild.runtime.tokenizer import GenerationConfig, Tokenizer

EMPTY = -1  # a KV slot that nothing was written to


class FakeExecutor:
    """Keeps token ids as the KV cache, and makes logits from the whole history it finds there.

    Any fault in block tables, chunks, preemption or padding changes the tokens that come out.
    """

    def __init__(
        self, num_blocks: int, block_size: int, vocab_size: int, eos_ids: frozenset[int]
    ) -> None:
        self.kv = np.full((num_blocks, block_size), EMPTY, dtype=np.int64)
        self.vocab_size = vocab_size
        self.eos_ids = eos_ids
        self.batches: list[StepBatch] = []
        self.calls: list[int] = []  # steps of each greedy call
        self.is_closed = False
        self.fail_with: BaseException | None = None
        self.before_step: Callable[[], None] | None = None

    def step(self, batch: StepBatch) -> NDArray[np.float32]:
        assert not self.is_closed
        if self.before_step is not None:
            self.before_step()
        if self.fail_with is not None:
            raise self.fail_with
        self._check_contract(batch)
        self.batches.append(batch)
        owners = np.repeat(np.arange(batch.num_sequences), np.diff(batch.query_start))
        for token, position, owner in zip(batch.token_ids, batch.positions, owners, strict=True):
            block, slot = self._place(batch, int(owner), int(position))
            self.kv[block, slot] = token
        logits = [self._logits(batch, int(owners[row]), int(row)) for row in batch.logit_rows]
        return np.array(logits, dtype=np.float32).reshape(-1, self.vocab_size)

    def step_greedy(self, batch: StepBatch, num_steps: int = 1) -> list[list[int]]:
        """As many single steps, each on the tokens of the one before."""
        self.calls.append(num_steps)
        rows: list[list[int]] = [[] for _ in batch.logit_rows]
        for index in range(num_steps):
            logits = self.step(batch)
            best = logits.argmax(axis=1)
            is_finite = np.isfinite(logits[np.arange(len(best)), best])
            for row, token, sound in zip(rows, best.tolist(), is_finite, strict=True):
                row.append(token if sound else ~token)
            if index + 1 < num_steps:
                assert batch.is_decode
                batch = StepBatch(
                    token_ids=best.astype(np.int32),
                    positions=batch.positions + 1,
                    query_start=batch.query_start,
                    kv_lengths=batch.kv_lengths + 1,
                    block_tables=batch.block_tables,
                    logit_rows=batch.logit_rows,
                )
        return rows

    def close(self) -> None:
        self.is_closed = True

    def _logits(self, batch: StepBatch, owner: int, row: int) -> NDArray[np.float32]:
        length = int(batch.positions[row]) + 1
        places = [self._place(batch, owner, position) for position in range(length)]
        history = [int(self.kv[place]) for place in places]
        assert EMPTY not in history, "attention reads a slot that was never written"
        return logits_after(history, self.vocab_size, self.eos_ids)

    def _place(self, batch: StepBatch, owner: int, position: int) -> tuple[int, int]:
        block_size = self.kv.shape[1]
        return int(batch.block_tables[owner, position // block_size]), position % block_size

    def _check_contract(self, batch: StepBatch) -> None:
        num_blocks = len(self.kv)
        for array in (
            batch.token_ids,
            batch.positions,
            batch.query_start,
            batch.kv_lengths,
            batch.block_tables,
            batch.logit_rows,
        ):
            assert array.dtype == np.int32
            assert array.flags.c_contiguous
        assert batch.query_start[0] == 0
        assert batch.query_start[-1] == batch.num_tokens
        assert np.diff(batch.query_start).min() >= 1, "a sequence brings no token"
        assert batch.block_tables.shape[0] == batch.num_sequences
        assert batch.block_tables.min() >= 0
        assert batch.block_tables.max() < num_blocks
        live = batch.block_tables[batch.block_tables > 0]
        assert len(live) == len(set(live.tolist())), "two sequences of a step share a block"
        for start, stop, length in zip(
            batch.query_start, batch.query_start[1:], batch.kv_lengths, strict=False
        ):
            assert batch.positions[start:stop].tolist() == list(
                range(length - (stop - start), length)
            )


def logits_after(
    history: Sequence[int], vocab_size: int, eos_ids: frozenset[int]
) -> NDArray[np.float32]:
    """The fake model: logits that any change of the history changes; EOS is rather likely."""
    seed = zlib.crc32(np.array(history, dtype=np.int64).tobytes())
    logits = np.random.default_rng(seed).standard_normal(vocab_size).astype(np.float32)
    logits[list(eos_ids)] += 1.0
    return logits


@dataclass
class Rig:
    """A loop over the fake executor, and its parts."""

    loop: Loop
    executor: FakeExecutor
    scheduler: Scheduler
    manager: KVManager
    tokenizer: Tokenizer

    def run_to_end(self, max_steps: int = 5000) -> None:
        for _ in range(max_steps):
            if not self.loop.step():
                return
            self.loop.check()
        raise AssertionError(f"requests are still live after {max_steps} steps")

    def run_alone(self, prompt_ids: Sequence[int], params: SamplingParams) -> list[int]:
        """Output tokens of the fake model without a scheduler or a KV cache, stops ignored."""
        rng = make_rng(params.seed)
        history = list(prompt_ids)
        eos_ids = self.tokenizer.eos_ids
        for _ in range(params.max_tokens):
            logits = logits_after(history, self.executor.vocab_size, eos_ids)
            history.append(sample(logits, params, rng))
            if history[-1] in eos_ids and not params.ignore_eos:
                break
        return history[len(prompt_ids) :]


def build_rig(
    tokenizer: Tokenizer,
    *,
    num_blocks: int = 40,
    block_size: int = 4,
    max_sequence_length: int = 64,
    max_step_tokens: int = 32,
    max_sequences: int = 8,
    chunk_tokens: int | None = None,
    buckets: Sequence[int] = (),
    vocab_size: int = 300,
    call_s: float = 0.0,
) -> Rig:
    """call_s: 0 runs single steps, infinity as many in a call as can be."""
    limits = Limits(
        max_sequence_length=max_sequence_length,
        max_step_tokens=max_step_tokens,
        max_sequences=max_sequences,
    )
    manager = KVManager(BlockPool(num_blocks), block_size)
    scheduler = Scheduler(limits, manager, chunk_tokens)
    executor = FakeExecutor(num_blocks, block_size, vocab_size, tokenizer.eos_ids)
    loop = Loop(executor, scheduler, tokenizer, vocab_size, buckets, call_s)
    return Rig(loop, executor, scheduler, manager, tokenizer)


def byte_level_backend() -> Backend:
    """Byte-level BPE: all bytes, and merges that cut characters of several bytes in odd places."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    encoder = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)

    def spelled(text: str) -> str:
        return "".join(piece for piece, _ in encoder.pre_tokenize_str(text))

    chinese, emoji = spelled("你"), spelled("😀")
    merges = [
        ("h", "e"),
        ("l", "l"),
        (spelled(" "), "w"),
        (chinese[0], chinese[1]),
        (emoji[2], emoji[3]),
        (emoji[3], spelled(" ")),
    ]
    words = [*alphabet, *(left + right for left, right in merges)]
    vocab = {word: index for index, word in enumerate(words)}
    backend = Backend(models.BPE(vocab=vocab, merges=merges))
    backend.pre_tokenizer = encoder
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken("<|begin|>", special=True), "<|end|>", "<|stop|>"])
    backend.add_tokens([AddedToken("<think>", special=False)])
    return backend


def sentencepiece_backend() -> Backend:
    """BPE with byte fallback, spelled and decoded as converted SentencePiece models are."""
    words = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    words += ["\u2581", *"abcdefghijklmnopqrstuvwxyz", "é", "\u2581a", "th", "\u2581th", "he"]
    merges = [("\u2581", "a"), ("t", "h"), ("\u2581", "th"), ("h", "e")]
    vocab = {word: index for index, word in enumerate(words)}
    backend = Backend(
        models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    )
    backend.normalizer = normalizers.Sequence(
        [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
    )
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("\u2581", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    return backend


def make_byte_level(*, add_bos: bool = False) -> Tokenizer:
    backend = byte_level_backend()
    ids = [backend.token_to_id(token) for token in ("<|begin|>", "<|end|>", "<|stop|>")]
    return Tokenizer(backend, GenerationConfig(ids[0], ids[1:], add_bos))


def make_sentencepiece() -> Tokenizer:
    return Tokenizer(sentencepiece_backend(), GenerationConfig(1, [2], True))


@pytest.fixture(scope="session")
def byte_level() -> Tokenizer:
    return make_byte_level()


@pytest.fixture(scope="session")
def sentencepiece() -> Tokenizer:
    return make_sentencepiece()


@pytest.fixture(scope="session")
def make_rig(byte_level: Tokenizer) -> Callable[..., Rig]:
    """Builds a loop over the fake executor with the byte-level tokenizer."""

    def make(**options: object) -> Rig:
        return build_rig(byte_level, **options)  # type: ignore[arg-type]

    return make
