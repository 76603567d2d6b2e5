"""Progress of fetching: bars on a terminal, one plain line a task elsewhere."""

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Protocol

Advance = Callable[[int], None]


class Progress(Protocol):
    """Where a fetch reports what it does."""

    def task(self, label: str, total_bytes: int | None) -> AbstractContextManager[Advance]:
        """A task that lasts as long as the context; its value is called with bytes just done."""

    def busy(self, label: str) -> AbstractContextManager[object]:
        """A task of unknown length, which says nothing itself and has no other inside."""

    def note(self, text: str) -> None:
        """Say one line."""


class PlainProgress:
    """Lines on stderr: for logs and pipes."""

    @contextmanager
    def task(self, label: str, total_bytes: int | None) -> Iterator[Advance]:
        size = "" if total_bytes is None else f" ({total_bytes / 1e6:.1f} MB)"
        self.note(f"{label}{size}")
        yield lambda _: None

    def busy(self, label: str) -> AbstractContextManager[object]:
        return nullcontext()

    def note(self, text: str) -> None:
        print(text, file=sys.stderr, flush=True)


class TerminalProgress:
    """Bars with bytes, speed and time left, on stderr."""

    @contextmanager
    def task(self, label: str, total_bytes: int | None) -> Iterator[Advance]:
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            DownloadColumn,
            TextColumn,
            TimeRemainingColumn,
            TransferSpeedColumn,
        )
        from rich.progress import Progress as Bars

        with Bars(
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            DownloadColumn(),
            TransferSpeedColumn(),
            TimeRemainingColumn(),
            console=Console(stderr=True),
        ) as bars:
            task = bars.add_task(label, total=total_bytes)
            yield lambda count: bars.advance(task, count)

    def busy(self, label: str) -> AbstractContextManager[object]:
        from rich.console import Console

        return Console(stderr=True).status(label)

    def note(self, text: str) -> None:
        print(text, file=sys.stderr, flush=True)


def stderr_progress() -> Progress:
    """Bars where stderr is a terminal, plain lines where it isn't."""
    return TerminalProgress() if sys.stderr.isatty() else PlainProgress()
