"""Notices at once when another rank's process is gone."""

import os
import select
import threading
from collections.abc import Callable, Mapping

from llmbuild.runtime.parallel.messages import Channel

_GONE = select.POLLRDHUP  # POLLHUP and POLLERR are told unasked


class Monitor:
    """A thread that waits for channels to be hung up, and calls `on_gone(rank)` then, once for
    each. Neither it nor on_gone may hold what is to be collected while it runs."""

    def __init__(self, channels: Mapping[int, Channel], on_gone: Callable[[int], None]) -> None:
        self._wake, self._stop = os.pipe()
        ranks = {channel.fileno(): rank for rank, channel in channels.items()}
        arguments = (ranks, self._wake, on_gone)
        self._thread = threading.Thread(target=_watch, args=arguments, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Ends the thread."""
        os.close(self._stop)  # its other end is hung up
        self._thread.join()
        os.close(self._wake)

    def forget(self) -> None:
        """Gives the descriptors up in a forked process, which hasn't the thread."""
        os.close(self._stop)
        os.close(self._wake)


def _watch(ranks: dict[int, int], wake: int, on_gone: Callable[[int], None]) -> None:
    poll = select.poll()
    for descriptor in (*ranks, wake):
        poll.register(descriptor, _GONE)
    while True:
        for descriptor, _ in poll.poll():
            if descriptor == wake:
                return
            poll.unregister(descriptor)
            on_gone(ranks[descriptor])
