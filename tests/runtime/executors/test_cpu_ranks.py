"""Engines of several ranks, all opened in this process, against the same model's engine of one."""

import ctypes
import mmap
import socket
from array import array
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llmbuild.builder.compile import compile
from llmbuild.builder.targets.cpu import toolchain
from llmbuild.errors import EngineError, RankError
from llmbuild.runtime.batch import StepBatch
from llmbuild.runtime.engine import Engine
from llmbuild.runtime.executors.cpu import CpuExecutor, RanksConfig, ranks_bytes
from llmbuild.runtime.isa import supported_levels
from llmbuild.runtime.manifest import read_manifest

BLOCKS = 16
MANY = ((3, 1), (1, 3), (2, 2))  # each rank takes seconds to compile
TABLES = ((7, 2, 9, 4), (8, 3, 5, 11), (10, 12, 13, 14))
SHAPES = [(2, 1), (1, 2), *(pytest.param(*shape, marks=pytest.mark.slow) for shape in MANY)]
WAYS = ("memory", "sockets")


@pytest.fixture(scope="module")
def engine_of(
    tmp_path_factory: pytest.TempPathFactory, save_tiny_llama: Callable[..., Path]
) -> Callable[[int, int], Engine]:
    """engine_of(tp, pp): the same model of 3 layers, 5 heads on one KV head, and 67 tokens."""
    sizes = {"num_attention_heads": 5, "num_key_value_heads": 1, "head_dim": 6, "hidden_size": 27}
    folder = tmp_path_factory.mktemp("ranks")
    recipe = save_tiny_llama(folder, num_hidden_layers=3, intermediate_size=19, **sizes)
    engines: dict[tuple[int, int], Engine] = {}

    def engine(tp: int, pp: int) -> Engine:
        if (tp, pp) not in engines:
            with pytest.MonkeyPatch.context() as patch:  # which takes less time to compile
                flags = [flag.replace("-O3", "-O0") for flag in toolchain._FLAGS]
                patch.setattr(toolchain, "_FLAGS", flags)
                overrides = [f"parallel.tp={tp}", f"parallel.pp={pp}"]
                root = compile(recipe, folder / f"engine{tp}{pp}", overrides)
            engines[tp, pp] = Engine(root, read_manifest(root), supported_levels()[0])
        return engines[tp, pp]

    return engine


class Ranks:
    """All ranks of an engine; a call runs on each at the same time, in a thread."""

    def __init__(self, executors: list[CpuExecutor]) -> None:
        self.executors = executors

    def call(self, name: str, *arguments: Any, absent: Sequence[int] = ()) -> list[Any]:
        """What the method returns, or raises, on every rank but the absent."""

        def run(executor: CpuExecutor) -> Any:
            try:
                return getattr(executor, name)(*arguments)
            except RankError as error:
                return error

        present = [each for rank, each in enumerate(self.executors) if rank not in absent]
        with ThreadPoolExecutor(len(present)) as pool:
            return list(pool.map(run, present))

    def logits(self, parts: Sequence[StepBatch]) -> Any:
        arrays, sizes = joined(parts)

        def run(rank: int) -> Any:
            return self.executors[rank].step_parts(arrays, sizes, rank == 0)

        with ThreadPoolExecutor(len(self.executors)) as pool:
            first, *others = pool.map(run, range(len(self.executors)))
        assert others == [None] * len(others)
        return first

    def greedy(self, parts: Sequence[StepBatch], num_steps: int) -> Any:
        first, *others = self.call("step_parts_greedy", *joined(parts), num_steps)
        assert others == [[]] * len(others)
        return first


@contextmanager
def opened(engine: Engine, way: str, timeout_s: float = 60) -> Iterator[Ranks]:
    """Teams of one and two threads in turn."""
    parallel, ranks = engine.manifest.parallel, range(len(engine.manifest.ranks))
    firsts = [record.tokens.first for record in engine.manifest.ranks[: parallel.tp]]
    memory = mmap.mmap(-1, ranks_bytes(engine))
    with ExitStack() as stack:
        sockets: dict[tuple[int, int], socket.socket] = {}
        for a, b in combinations(ranks, 2):
            sockets[a, b], sockets[b, a] = map(stack.enter_context, socket.socketpair())
        executors = []
        for rank in ranks:
            config = RanksConfig(rank=rank, tp=parallel.tp, pp=parallel.pp)
            config.timeout_ms = round(1000 * timeout_s)
            tokens = [*firsts, engine.manifest.vocab_size]
            config.token_firsts = (ctypes.c_int32 * len(tokens))(*tokens)
            if way == "memory":
                config.memory = ctypes.addressof(ctypes.c_char.from_buffer(memory))
                config.memory_bytes = len(memory)
            else:
                numbers = [sockets[rank, r].fileno() if r != rank else -1 for r in ranks]
                config.sockets = (ctypes.c_int32 * len(numbers))(*numbers)
            executor = CpuExecutor(engine, BLOCKS, 1 + rank % 2, rank=rank, ranks=config)
            executors.append(stack.enter_context(closing(executor)))
        yield Ranks(executors)


def int32(values: Sequence[int]) -> np.ndarray:
    return np.array(values, np.int32)


def ragged(sequences: Sequence[tuple[int, int, int]], rows: Sequence[int]) -> StepBatch:
    """Sequences given as (number, first position, tokens), and the tokens that want logits."""
    rng = np.random.default_rng(len(rows))
    counts = [count for _, _, count in sequences]
    return StepBatch(
        token_ids=rng.integers(0, 256, sum(counts)).astype(np.int32),
        positions=int32([first + i for _, first, count in sequences for i in range(count)]),
        query_start=int32(np.cumsum([0, *counts])),
        kv_lengths=int32([first + count for _, first, count in sequences]),
        block_tables=int32([TABLES[number] for number, _, _ in sequences]),
        logit_rows=int32(rows),
    )


def decode(sequences: Sequence[int], tokens: Sequence[int], lengths: Sequence[int]) -> StepBatch:
    return StepBatch(
        token_ids=int32(tokens),
        positions=int32(lengths),
        query_start=int32(range(len(tokens) + 1)),
        kv_lengths=int32(lengths) + 1,
        block_tables=int32([TABLES[number] for number in sequences]),
        logit_rows=int32(range(len(tokens))),
    )


def joined(parts: Sequence[StepBatch]) -> tuple["array[int]", "array[int]"]:
    arrays, sizes = array("i"), array("i")
    for part in parts:
        arrays += part.data
        sizes.extend((part.num_tokens, part.num_sequences))
        sizes.extend((part.num_logit_rows, part.blocks_per_sequence))
    return arrays, sizes


# One sequence's prompt in two parts, one without logits; and two others.
PREFILL = [
    ragged([(0, 0, 5)], []),
    ragged([(0, 5, 2), (1, 0, 1)], [0, 1, 2]),
    ragged([(2, 0, 6)], [2, 5]),
]
LENGTHS = [7, 1, 6]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("tp", "pp"), SHAPES)
def test_logits_of_all_parts_are_those_of_one_rank(
    engine_of: Callable[[int, int], Engine], tp: int, pp: int, way: str
) -> None:
    with closing(CpuExecutor(engine_of(1, 1), BLOCKS, 2)) as one:
        expected = np.concatenate([one.step(part) for part in PREFILL])
    with opened(engine_of(tp, pp), way) as ranks:
        together = ranks.logits(PREFILL)
        in_turn = np.concatenate([ranks.logits([part]) for part in PREFILL])
    assert np.array_equal(together, in_turn)
    assert together.shape == expected.shape == (5, 257)
    assert np.abs(together - expected).max() <= 1e-5 * np.abs(expected).max()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("tp", "pp"), SHAPES)
def test_greedy_steps_give_the_tokens_of_one_rank(
    engine_of: Callable[[int, int], Engine], tp: int, pp: int, way: str
) -> None:
    """In any parts; each decode step on the tokens of the one before, across blocks."""
    with closing(CpuExecutor(engine_of(1, 1), BLOCKS, 2)) as one:
        prompts = [row for part in PREFILL for row in one.step_greedy(part)]
        tokens = [prompts[row][0] for row in (1, 2, 4)]
        expected = one.step_greedy(decode(range(3), tokens, LENGTHS), 8)
    assert len({token for row in expected for token in row}) > 4
    with opened(engine_of(tp, pp), way) as ranks:
        assert ranks.greedy(PREFILL, 1) == prompts
        for cuts in ([0, 3], [0, 1, 3], [0, 1, 2, 3]):
            parts = [decode(range(a, b), tokens[a:b], LENGTHS[a:b]) for a, b in pairwise(cuts)]
            assert ranks.greedy(parts, 8) == expected


def test_ties_between_ranks_go_to_the_lowest_token_and_what_is_not_finite_is_told(
    engine_of: Callable[[int, int], Engine],
) -> None:
    """A KV cache full of NaN: every logit is one, and the first token is named."""
    with opened(engine_of(2, 1), "memory") as ranks:
        ranks.logits(PREFILL)
        for executor in ranks.executors:
            executor._kv.view(np.float32)[:] = np.nan
        assert ranks.greedy([decode([0], [5], [7])], 1) == [[~0]]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("tp", "pp"), SHAPES)
def test_every_rank_gives_up_on_one_that_does_not_come(
    engine_of: Callable[[int, int], Engine], tp: int, pp: int, way: str
) -> None:
    """And stays so: later steps fail at once."""
    world, step = tp * pp, decode(range(3), [1, 2, 3], LENGTHS)
    for absent in (0, world - 1):
        with opened(engine_of(tp, pp), way, timeout_s=0.5) as ranks:
            for _ in range(2):
                failed = ranks.call("step_parts_greedy", *joined([step]), 8, absent=[absent])
                assert all(isinstance(error, RankError) for error in failed)
                if way == "memory":
                    assert {error.rank for error in failed} <= set(range(world))


def test_named_rank_is_the_one_that_does_not_come(
    engine_of: Callable[[int, int], Engine],
) -> None:
    with opened(engine_of(2, 1), "memory", timeout_s=0.3) as ranks:
        step = decode([0], [1], [7])
        (failed,) = ranks.call("step_parts_greedy", *joined([step]), 8, absent=[1])
        assert failed.rank == 1
        assert "rank 1 of the engine is gone, or kept rank 0 waiting" in str(failed)


def test_memory_that_is_too_small_is_refused(engine_of: Callable[[int, int], Engine]) -> None:
    engine = engine_of(2, 1)
    config = RanksConfig(rank=0, tp=2, pp=1, timeout_ms=100)
    config.token_firsts = (ctypes.c_int32 * 3)(0, 100, 257)
    memory = mmap.mmap(-1, ranks_bytes(engine) - 1)
    config.memory = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    config.memory_bytes = len(memory)
    with pytest.raises(EngineError, match="can't start 1 threads"):
        CpuExecutor(engine, BLOCKS, 1, rank=0, ranks=config)


def test_engine_of_one_rank_needs_no_shared_memory(
    engine_of: Callable[[int, int], Engine],
) -> None:
    assert ranks_bytes(engine_of(1, 1)) == 0
    assert ranks_bytes(engine_of(2, 1)) > 0
