"""A lock that can't be kept from others by taking it again and again."""

import threading
from types import TracebackType


class FairLock:
    """A reentrant lock; a thread that waits for it gets it before one that comes later.

    Who waits stands in the door, so that the thread that has just released the lock has to queue
    behind. The door is reentrant as well: garbage that is collected while a thread stands in it
    can want the lock.
    """

    def __init__(self) -> None:
        self._door = threading.RLock()
        self._lock = threading.RLock()

    def __enter__(self) -> None:
        if self._lock._is_owned():  # type: ignore[attr-defined]
            self._lock.acquire()
            return
        with self._door:
            self._lock.acquire()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._lock.release()
