"""Which processors each rank of a host computes on."""

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import msgspec

from llmbuild.runtime.threads import check_num_threads, check_pinning


class Seat(msgspec.Struct, frozen=True):
    """Where a rank computes. processors: its own, which no other rank of its host has; none where
    they are too few for that, and it may use any then. pin_threads: thread i keeps to the i-th."""

    num_threads: int
    pin_threads: bool
    processors: tuple[int, ...]


def choose_seats(
    processors: Sequence[int],
    num_ranks: int,
    num_threads: int | None = None,
    pin_threads: bool | None = None,
) -> list[Seat]:
    """The seats of the ranks that share some processors, which are dealt to them in runs.

    num_threads: of each rank, by default its processors. pin_threads: by default where a rank has
    as many threads as processors. Raises UserError for a bad number or choice.
    """
    check_num_threads(num_threads)
    check_pinning(pin_threads)
    if len(processors) < num_ranks:
        return [Seat(num_threads or 1, False, ())] * num_ranks
    ordered, total = sorted(processors), len(processors)
    seats = []
    for rank in range(num_ranks):
        run = ordered[rank * total // num_ranks : (rank + 1) * total // num_ranks]
        threads = num_threads or len(run)
        pins = threads == len(run) if pin_threads is None else pin_threads
        seats.append(Seat(threads, pins, tuple(run)))
    return seats


def warn_if_crowded(seats: Sequence[Seat], processors: Sequence[int]) -> None:
    """Says on standard error when ranks that share processors have more threads than these."""
    threads = sum(seat.num_threads for seat in seats)
    if threads > len(processors):
        print(
            f"Warning: {len(seats)} ranks of this host have {threads} threads together, but may "
            f"use {len(processors)} processors; threads that share one wait for each other",
            file=sys.stderr,
        )


@contextmanager
def seated(seat: Seat) -> Iterator[None]:
    """Keeps this thread, and those that it starts, to the seat's processors meanwhile."""
    before = os.sched_getaffinity(0)
    if seat.processors:
        os.sched_setaffinity(0, seat.processors)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)
