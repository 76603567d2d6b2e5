"""Progress of what takes long: bars on a terminal, plain lines elsewhere."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from rich.progress import ProgressColumn

Advance = Callable[[int], None]

_LINE_SECONDS = 60


class Progress(Protocol):
    """Where a fetch reports what it does."""

    def task(self, label: str, total_bytes: int | None) -> AbstractContextManager[Advance]:
        """A task that lasts as long as the context; its value is called with bytes just done."""

    def counted(self, label: str, total: int) -> AbstractContextManager[Advance]:
        """The same of a task that is counted in something else."""

    def busy(self, label: str) -> AbstractContextManager[object]:
        """A task of unknown length, which says nothing itself and has no other inside."""

    def note(self, text: str) -> None:
        """Say one line."""


class PlainProgress:
    """Lines on stderr: for logs and pipes."""

    @contextmanager
    def task(self, label: str, total_bytes: int | None) -> Iterator[Advance]:
        """A line at the start, and at most one every _LINE_SECONDS from then on."""
        size = "" if total_bytes is None else f" ({total_bytes / 1e6:.1f} MB)"
        self.note(f"{label}{size}")
        yield self._counter(label, lambda done: f"{done / 1e6:.1f} MB")

    @contextmanager
    def counted(self, label: str, total: int) -> Iterator[Advance]:
        """A line at the start, and at most one every _LINE_SECONDS from then on."""
        self.note(f"{label}: 0 of {total}")
        yield self._counter(label, lambda done: f"{done} of {total}")

    def _counter(self, label: str, words: Callable[[int], str]) -> Advance:
        done, said_at = 0, time.monotonic()

        def advance(count: int) -> None:
            nonlocal done, said_at
            done += count
            if time.monotonic() - said_at >= _LINE_SECONDS:
                said_at = time.monotonic()
                self.note(f"{label}: {words(done)}")

        return advance

    def busy(self, label: str) -> AbstractContextManager[object]:
        return nullcontext()

    def note(self, text: str) -> None:
        print(text, file=sys.stderr, flush=True)


class TerminalProgress:
    """Bars with bytes, speed and time left, on stderr."""

    def task(self, label: str, total_bytes: int | None) -> AbstractContextManager[Advance]:
        from rich.progress import DownloadColumn, TransferSpeedColumn

        return _bar(label, total_bytes, DownloadColumn(), TransferSpeedColumn())

    def counted(self, label: str, total: int) -> AbstractContextManager[Advance]:
        from rich.progress import MofNCompleteColumn

        return _bar(label, total, MofNCompleteColumn())

    def busy(self, label: str) -> AbstractContextManager[object]:
        from rich.console import Console

        return Console(stderr=True).status(label)

    def note(self, text: str) -> None:
        print(text, file=sys.stderr, flush=True)


def stderr_progress() -> Progress:
    """Bars where stderr is a terminal, plain lines where it isn't."""
    return TerminalProgress() if sys.stderr.isatty() else PlainProgress()


@contextmanager
def _bar(label: str, total: int | None, *figures: "ProgressColumn") -> Iterator[Advance]:
    from rich.console import Console
    from rich.progress import BarColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bars

    with Bars(
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        *figures,
        TimeRemainingColumn(),
        console=Console(stderr=True),
    ) as bars:
        task = bars.add_task(label, total=total)
        yield lambda count: bars.advance(task, count)
