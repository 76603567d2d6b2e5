"""Ranks as processes: their sums, their messages, and what they do when one of them is missing."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
from kernel_harness import EACH_LEVEL, LEVELS, KernelCompiler, Library
from numpy.typing import NDArray
from rank_processes import NEEDED_BYTES, WAYS, Body, Ranks, shared

SOURCE = (
    NEEDED_BYTES
    + """
#include "all_reduce/cpu.h"
#include "stage_transfer/cpu.h"

// `rounds` sums of x: [rounds, count], all of them by one attached rank.
extern "C" int reduce(const RanksConfig* config, int max_floats, int threads, float* x,
                      int count, int rounds) {
  const auto ranks = make_ranks(*config, max_floats);
  with_team(threads, [&](const Worker& worker) {
    for (int round = 0; round < rounds; ++round) {
      all_reduce<1>(worker, *ranks, x + round * count, count);
      worker.barrier();
    }
  });
  return ranks->failed_rank();
}

// x: [rows, 3] goes from the first stage to the last.
extern "C" int hand_on(const RanksConfig* config, int max_floats, float* x, int rows) {
  const auto ranks = make_ranks(*config, max_floats);
  with_team(2, [&](const Worker& worker) {
    if (ranks->rank >= ranks->tp) receive_rows<3>(worker, *ranks, x, rows);
    worker.barrier();
    if (ranks->rank < ranks->chief()) send_rows<3>(worker, *ranks, x, rows);
  });
  return ranks->failed_rank();
}

// A byte to the other rank, and one of it.
extern "C" int swap(const RanksConfig* config, int other) {
  const auto ranks = make_ranks(*config, 0);
  uint8_t byte = 0;
  ranks->send(other, &byte, 1);
  ranks->receive(other, &byte, 1);
  return ranks->failed_rank();
}

// Every rank sends its bytes to the next, and only then receives those of the one before, in parts.
extern "C" int go_round(const RanksConfig* config, const uint8_t* mine, uint8_t* others,
                        int bytes) {
  const auto ranks = make_ranks(*config, 0);
  const int world = ranks->tp * ranks->pp;
  ranks->send((ranks->rank + 1) % world, mine, bytes);
  const int before = (ranks->rank + world - 1) % world;
  for (int begin = 0, end = 1; begin < bytes; begin = end, end = std::min(bytes, 3 * end)) {
    ranks->receive(before, others + begin, end - begin);
  }
  return ranks->failed_rank();
}

extern "C" int receive_byte(const RanksConfig* config, int from) {
  const auto ranks = make_ranks(*config, 1000);
  uint8_t byte;
  ranks->receive(from, &byte, 1);
  ranks->receive(from, &byte, 1);  // returns at once
  return ranks->failed_rank();
}
"""
)


@pytest.fixture(scope="module", params=EACH_LEVEL)
def every_library(request: pytest.FixtureRequest, compiler: KernelCompiler) -> Library:
    return compiler.library(SOURCE, request.param)


@pytest.fixture(scope="module")
def library(compiler: KernelCompiler) -> Library:
    return compiler.library(SOURCE, LEVELS[0])


@contextmanager
def takes(least_s: float, most_s: float) -> Iterator[None]:
    start = time.monotonic()
    yield
    assert least_s <= time.monotonic() - start < most_s


def reduced(
    ranks: Ranks, library: Library, parts: NDArray, max_floats: int, threads: int
) -> NDArray:
    """What every rank has after the sums of parts: [tp, rounds, count]."""
    x = shared(parts.shape, np.float32)
    x[:] = parts
    _, rounds, count = parts.shape

    def body(config: NDArray, rank: int) -> int:
        own = 1 + (threads + rank - 1) % 3  # teams of several sizes
        numbers = (max_floats, own, x[rank])
        return library.call("reduce", config, *numbers, count, rounds)

    assert ranks.run(body) == [-1] * ranks.tp
    return x


def parts_of(tp: int, rounds: int, count: int) -> NDArray:
    """Of several magnitudes, so that another order of adding gives another sum."""
    rng = np.random.default_rng(count)
    values = rng.standard_normal((tp, rounds, count)) * 10.0 ** rng.integers(-3, 4, (tp, 1, count))
    return values.astype(np.float32)


def sum_in_order(parts: NDArray) -> NDArray:
    total = parts[0].copy()
    for part in parts[1:]:
        total += part
    return total


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("count", [1, 16, 1009])
@pytest.mark.parametrize("tp", [2, 3, 5])
def test_every_rank_has_the_sum_in_the_order_of_ranks(
    every_library: Library, tp: int, count: int, threads: int, way: str
) -> None:
    """To the bit, round after round; of 1009 floats only 112 go at once."""
    parts = parts_of(tp, 7, count)
    ranks = Ranks(every_library, way, tp=tp, max_floats=100)
    got = reduced(ranks, every_library, parts, 100, threads)
    for rank in range(tp):
        assert got[rank].tobytes() == sum_in_order(parts).tobytes()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("count", [(1 << 14) + 13, 3 * (1 << 18) + 1])
@pytest.mark.parametrize("tp", [2, 3, 5])
def test_large_sums_are_the_same_in_shares_and_in_pieces(
    library: Library, tp: int, count: int, way: str
) -> None:
    """From 2^14 floats on each of three or more ranks sums a share; 2^18 go at once."""
    parts = parts_of(tp, 2, count)
    ranks = Ranks(library, way, tp=tp, max_floats=count)
    got = reduced(ranks, library, parts, count, threads=2)
    for rank in range(tp):
        assert got[rank].tobytes() == sum_in_order(parts).tobytes()


def test_stages_sum_for_themselves(library: Library) -> None:
    parts = parts_of(4, 3, 1009)
    ranks = Ranks(library, "memory", tp=2, pp=2, max_floats=1009)
    x = shared(parts.shape, np.float32)
    x[:] = parts

    def body(config: NDArray, rank: int) -> int:
        numbers = (1009, 1, x[rank], 1009, 3)
        return library.call("reduce", config, *numbers)

    assert ranks.run(body) == [-1] * 4
    for stage in range(2):
        expected = sum_in_order(parts[2 * stage : 2 * stage + 2])
        for rank in (2 * stage, 2 * stage + 1):
            assert x[rank].tobytes() == expected.tobytes()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("rows", [1, 1009, 40_009])  # of 12 bytes; 4032 fit the channel
@pytest.mark.parametrize(("tp", "pp"), [(1, 2), (2, 3)])
def test_rows_come_to_the_last_stage_as_the_first_sent_them(
    library: Library, tp: int, pp: int, rows: int, way: str
) -> None:
    ranks = Ranks(library, way, tp=tp, pp=pp)
    x = shared((pp, tp, rows * 3), np.float32)
    x[0] = np.random.default_rng(rows).standard_normal((tp, rows * 3))

    def body(config: NDArray, rank: int) -> int:
        own = x.reshape(pp * tp, -1)[rank]
        numbers = (1000, own, rows)
        return library.call("hand_on", config, *numbers)

    assert ranks.run(body) == [-1] * (tp * pp)
    for stage in range(1, pp):
        assert x[stage].tobytes() == x[0].tobytes()


@pytest.mark.parametrize("size", [1, 100_003, 20_000_003])
def test_sockets_never_block_ranks_that_all_send_first(library: Library, size: int) -> None:
    """The largest is more than the sockets of the ring can hold."""
    ranks = Ranks(library, "sockets", tp=3)
    mine, others = shared((3, size), np.uint8), shared((3, size), np.uint8)
    mine[:] = np.random.default_rng(1).integers(0, 256, (3, size))

    def body(config: NDArray, rank: int) -> int:
        arrays = mine[rank], others[rank]
        return library.call("go_round", config, *arrays, size)

    assert ranks.run(body) == [-1] * 3
    assert np.array_equal(others, np.roll(mine, 1, axis=0))


def waiting_sum(library: Library, threads: int) -> Body:
    """A sum, which waits for all ranks."""
    x = shared((3, 1009), np.float32)

    def body(config: NDArray, rank: int) -> int:
        numbers = (100, threads, x[rank], 1009, 1)
        return library.call("reduce", config, *numbers)

    return body


@pytest.mark.parametrize("threads", [1, 3])
def test_rank_that_never_comes_is_named_by_all_once_the_time_is_over(
    library: Library, threads: int
) -> None:
    ranks = Ranks(library, "memory", tp=3, timeout_s=0.3)
    with takes(0.3, 10):
        assert ranks.run(waiting_sum(library, threads), 2) == [2, 2, 0]


def test_silent_rank_is_named_by_who_waits_for_its_message(library: Library) -> None:
    """Of two ranks that say nothing, the one that was asked."""
    for way in WAYS:
        ranks = Ranks(library, way, pp=3, timeout_s=0.3)

        def body(config: NDArray, rank: int) -> int:
            if rank == 2:
                return library.call("receive_byte", config, 1)
            time.sleep(1)
            return 7

        with takes(0.3, 10):
            assert ranks.run(body) == [7, 7, 1]


def test_rank_that_others_wait_for_indirectly_is_named(library: Library) -> None:
    """Rank 0 waits for 2, whose time is over later, as it waits for 1 only then."""
    ranks = Ranks(library, "memory", pp=3, timeout_s=0.5)

    def body(config: NDArray, rank: int) -> int:
        time.sleep(0.2 if rank == 2 else 0)
        return library.call("receive_byte", config, 2 if rank == 0 else 1)

    with takes(0.5, 10):
        assert ranks.run(body, 1) == [1, 0, 1]


@pytest.mark.parametrize("threads", [1, 3])
def test_failure_that_others_state_ends_a_wait_at_once(library: Library, threads: int) -> None:
    ranks = Ranks(library, "memory", tp=3)
    with takes(0.2, 10):
        ranks.start(waiting_sum(library, threads), 1)
        time.sleep(0.2)
        assert ranks.memory is not None
        ranks.memory[0] = 1 + 1
        assert ranks.join() == [1, 0, 1]


def test_sockets_tell_at_once_that_a_rank_has_ended(library: Library) -> None:
    """Rank 1 waits for 0, which lives on, and 0 for 2, which is gone: both know which it was. (Rank
    1 has seen it go by the time that 0 tells it; of two that it sees go at once, it names either.)
    """
    ranks = Ranks(library, "sockets", tp=3)

    def body(config: NDArray, rank: int) -> int:
        if rank == 2:
            return 7
        time.sleep(2 if rank == 0 else 0)
        with takes(0, 5):
            failed = library.call("receive_byte", config, 2 if rank == 0 else 0)
        time.sleep(4 if rank == 0 else 0)
        return failed

    assert ranks.run(body) == [2, 2, 7]


def test_rank_may_leave_once_it_has_done_its_work(library: Library) -> None:
    """Others still wait for each other, and don't mind."""
    ranks = Ranks(library, "sockets", tp=3)

    def body(config: NDArray, rank: int) -> int:
        if rank == 2:
            return 7
        time.sleep(0.2 * rank)
        return library.call("swap", config, 1 - rank)

    assert ranks.run(body) == [-1, -1, 7]


def test_memory_that_is_needed_grows_with_the_ranks_but_not_without_end(library: Library) -> None:
    def needed(tp: int, pp: int, max_floats: int) -> int:
        return library.call("needed_bytes", tp, pp, max_floats)

    assert needed(2, 1, 1000) < needed(2, 2, 1000) < needed(3, 2, 1000)
    assert needed(2, 2, 1) < needed(2, 2, 1000) < needed(2, 2, 1 << 18)
    assert needed(2, 2, 1 << 18) == needed(2, 2, 1 << 30)
