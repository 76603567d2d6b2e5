"""Interrupts that wait until what must not be left half done is done."""

import signal
import threading
from types import FrameType, TracebackType
from typing import Any, Self


class deferred_interrupts:
    """In this `with`, what Python would do at some signals, by default SIGINT (Ctrl-C), is put off
    until its end.

    A second signal doesn't wait, for the case that the end doesn't come. In other threads than
    the main one, where Python handles no signals, nothing is done. They may be nested.
    """

    def __init__(self, *numbers: signal.Signals) -> None:
        self._numbers = numbers or (signal.SIGINT,)

    def __enter__(self) -> Self:
        self._handlers: dict[int, Any] = {}
        self._pending: tuple[int, FrameType | None] | None = None
        self._is_over = False
        if threading.current_thread() is threading.main_thread():
            for number in self._numbers:
                handler = signal.getsignal(number)
                if callable(handler):
                    self._handlers[number] = handler
                    signal.signal(number, self._handle)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._is_over = True  # for one that comes before the handler is back
        for number, handler in self._handlers.items():
            if signal.getsignal(number) == self._handle:  # no one has set another meanwhile
                signal.signal(number, handler)
        if self._pending is not None:
            self._handlers[self._pending[0]](*self._pending)

    @property
    def is_pending(self) -> bool:
        """Whether one has come, and waits."""
        return self._pending is not None

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._is_over or self._pending is not None:
            self._handlers[number](number, frame)
        else:
            self._pending = (number, frame)
