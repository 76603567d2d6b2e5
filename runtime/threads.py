"""How many threads compute, and whether each keeps to a processor of its own."""

import os
import sys

from llmbuild.errors import UserError

MAX_THREADS = 1 << 16  # far beyond any machine; more doesn't fit the int that native code takes


def choose_num_threads(num_threads: int | None) -> int:
    """The number given, or by default the processors that this process may use.

    Raises UserError for what isn't a whole number from 1 to MAX_THREADS; says on standard error
    when there are more threads than processors.
    """
    check_num_threads(num_threads)
    available = num_processors()
    if num_threads is None:
        return available
    if num_threads > available:
        print(
            f"Warning: num_threads is {num_threads}, but this process may use {available} "
            f"processors; threads that share one wait for each other, {available} would be faster",
            file=sys.stderr,
        )
    return num_threads


def choose_pinning(pin_threads: bool | None, num_threads: int) -> bool:
    """Whether thread i keeps to the i-th processor, if that isn't stated.

    It does where there are as many threads as processors: each has one of its own then, and the
    system never puts two on one. Of fewer it does not, as others that pin theirs would choose the
    same processors.
    """
    check_pinning(pin_threads)
    return num_threads == num_processors() if pin_threads is None else pin_threads


def check_num_threads(num_threads: int | None) -> None:
    """Raises UserError for what isn't a whole number from 1 to MAX_THREADS, or None."""
    is_int = isinstance(num_threads, int) and not isinstance(num_threads, bool)
    if num_threads is not None and not (is_int and 1 <= num_threads <= MAX_THREADS):
        raise UserError(
            f"num_threads is {num_threads!r}; it must be a whole number >= 1 and <= {MAX_THREADS}"
        )


def check_pinning(pin_threads: bool | None) -> None:
    """Raises UserError for what is neither a choice nor None."""
    if pin_threads is not None and not isinstance(pin_threads, bool):
        raise UserError(f"pin_threads is {pin_threads!r}; it must be True, False or None")


def num_processors() -> int:
    """Those that this process may use."""
    return len(os.sched_getaffinity(0))
