"""How many threads compute."""

import os

from llmbuild.errors import UserError

MAX_THREADS = 1 << 16  # far beyond any machine; more doesn't fit the int that native code takes


def choose_num_threads(num_threads: int | None) -> int:
    """The number given, or by default the processors that this process may use.

    Raises UserError for what isn't a whole number from 1 to MAX_THREADS.
    """
    if num_threads is None:
        return len(os.sched_getaffinity(0))
    is_int = isinstance(num_threads, int) and not isinstance(num_threads, bool)
    if not is_int or not 1 <= num_threads <= MAX_THREADS:
        raise UserError(
            f"num_threads is {num_threads!r}; it must be a whole number >= 1 and <= {MAX_THREADS}"
        )
    return num_threads
