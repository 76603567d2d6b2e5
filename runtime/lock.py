"""A lock that can't be kept from others by taking it again and again."""

import threading

_RLock = type(threading.RLock())


class FairLock(_RLock):  # type: ignore[misc, valid-type]
    """A reentrant lock; a thread that waits for it gets it before one that comes later.

    Who waits stands in the door, so that the thread that has just released the lock has to queue
    behind. The door is reentrant as well: garbage that is collected while a thread stands in it
    can want the lock. An interrupt never leaves the lock held: releasing it is one native call.
    """

    def __init__(self) -> None:
        self._door = threading.RLock()

    def __enter__(self) -> None:
        if self._is_owned():
            self.acquire()
            return
        try:
            with self._door:
                self.acquire()
        except BaseException:  # an interrupt can come when the lock is taken already
            if self._is_owned():
                self.release()
            raise
