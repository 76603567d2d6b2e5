"""Interrupts that wait until what must not be left half done is done."""

import signal
import threading
from types import FrameType, TracebackType
from typing import Any


class deferred_interrupts:
    """In this `with`, what Python would do at SIGINT (Ctrl-C) is put off until its end.

    A second SIGINT doesn't wait, for the case that the end doesn't come. In other threads than
    the main one, where Python handles no signals, nothing is done. They may be nested.
    """

    def __enter__(self) -> None:
        self._handler: Any = None
        self._pending: tuple[int, FrameType | None] | None = None
        self._is_over = False
        if threading.current_thread() is threading.main_thread():
            handler = signal.getsignal(signal.SIGINT)
            if callable(handler):
                self._handler = handler
                signal.signal(signal.SIGINT, self._handle)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._handler is None:
            return
        self._is_over = True  # for one that comes before the handler is back
        if signal.getsignal(signal.SIGINT) == self._handle:  # no one has set another meanwhile
            signal.signal(signal.SIGINT, self._handler)
        if self._pending is not None:
            self._handler(*self._pending)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._is_over or self._pending is not None:
            self._handler(number, frame)
        else:
            self._pending = (number, frame)
