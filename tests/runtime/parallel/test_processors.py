"""Ranks of a host don't compute on each other's processors."""

import os
import threading

import pytest

from llmbuild.errors import UserError
from llmbuild.runtime.parallel.processors import Seat, choose_seats, seated, warn_if_crowded


@pytest.mark.parametrize("num_processors", [1, 2, 3, 5, 8, 13])
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 5])
def test_processors_are_dealt_in_runs_that_are_nearly_equal(num_processors, num_ranks):
    processors = [3 * n + 1 for n in range(num_processors)]
    seats = choose_seats(processors[::-1], num_ranks)
    assert len(seats) == num_ranks
    if num_processors < num_ranks:
        assert seats == [Seat(1, False, ())] * num_ranks
        return
    runs = [seat.processors for seat in seats]
    assert [each for run in runs for each in run] == processors
    assert max(map(len, runs)) - min(map(len, runs)) <= 1
    assert all(seat.num_threads == len(seat.processors) for seat in seats)
    assert all(seat.pin_threads for seat in seats)


@pytest.mark.parametrize("num_threads", [1, 2, 3])
def test_threads_that_are_stated_are_those_of_each_rank(num_threads):
    seats = choose_seats(range(7), 3, num_threads)
    assert [len(seat.processors) for seat in seats] == [2, 2, 3]
    assert [seat.num_threads for seat in seats] == [num_threads] * 3
    assert [seat.pin_threads for seat in seats] == [num_threads == 2] * 2 + [num_threads == 3]


@pytest.mark.parametrize("pins", [True, False])
def test_stated_pinning_is_kept_where_each_rank_has_processors(pins):
    assert {seat.pin_threads for seat in choose_seats(range(4), 2, 1, pins)} == {pins}
    assert not any(seat.pin_threads for seat in choose_seats(range(1), 2, 1, pins))


@pytest.mark.parametrize("options", [(0, None), (True, None), (1.5, None), (None, 1), (None, "no")])
def test_bad_options_are_refused(options):
    with pytest.raises(UserError):
        choose_seats(range(4), 2, *options)


@pytest.mark.parametrize(
    ("ranks", "threads", "total"), [(5, None, 5), (4, 2, 8), (2, 3, 6), (4, None, 0), (2, 2, 0)]
)
def test_more_threads_than_processors_are_warned_of_in_one_line(capsys, ranks, threads, total):
    warn_if_crowded(choose_seats(range(4), ranks, threads), range(4))
    out, err = capsys.readouterr()
    assert out == ""
    if not total:
        assert err == ""
        return
    assert err.startswith(f"Warning: {ranks} ranks of this host have {total} threads together")
    assert "4 processors" in err
    assert err.count("\n") == 1


def test_seat_is_kept_by_this_thread_alone_and_only_meanwhile():
    before = os.sched_getaffinity(0)
    last = max(before)
    seen: list[set[int]] = []
    started, leave = threading.Event(), threading.Event()

    def other() -> None:
        started.set()
        leave.wait(30)
        seen.append(os.sched_getaffinity(0))

    bystander = threading.Thread(target=other)
    bystander.start()
    started.wait(30)

    def fail_when_seated() -> None:
        with seated(Seat(1, True, (last,))):
            assert os.sched_getaffinity(0) == {last}
            raise KeyError

    with pytest.raises(KeyError):
        fail_when_seated()
    assert os.sched_getaffinity(0) == before
    leave.set()
    bystander.join()
    assert seen == [before]
    with seated(Seat(1, False, ())):
        assert os.sched_getaffinity(0) == before
