"""How many threads compute."""

import os

from llmbuild.errors import UserError


def choose_num_threads(num_threads: int | None) -> int:
    """The number given, or by default the processors that this process may use.

    Raises UserError for what isn't a whole number of at least 1.
    """
    if num_threads is None:
        return len(os.sched_getaffinity(0))
    if not isinstance(num_threads, int) or isinstance(num_threads, bool) or num_threads < 1:
        raise UserError(f"num_threads is {num_threads!r}; it must be a whole number >= 1")
    return num_threads
