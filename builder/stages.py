"""The stages of a build: timed, and shown as they pass."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

from llmbuild.builder.sources.progress import Progress


class Stages:
    """Times named stages and says each one's end in a line; `seconds` keeps them by name."""

    def __init__(self, progress: Progress) -> None:
        self.progress = progress
        self.seconds: dict[str, float] = {}

    @contextmanager
    def stage(self, name: str, *, shows_bars: bool = False) -> Iterator[None]:
        """shows_bars: the stage reports progress of its own, so that none is shown here."""
        start = time.perf_counter()
        with nullcontext() if shows_bars else self.progress.busy(name):
            yield
        self.seconds[name] = time.perf_counter() - start
        self.progress.note(f"{name:<24} {self.seconds[name]:7.2f} s")


def peak_rss_bytes() -> int:
    """The largest resident memory of this process so far. Not getrusage's ru_maxrss: that starts
    at what the process held that started this one."""
    return max(_earlier_peaks_bytes[-1], _status_bytes("VmHWM"))


def available_bytes() -> int:
    """Memory that the system could still give, MemAvailable of proc(5)."""
    return _kib_field(Path("/proc/meminfo"), "MemAvailable")


@contextmanager
def growth_bytes() -> Iterator[Callable[[], int]]:
    """Gives a function that says by how much resident memory has grown at most since then; not
    more than one at a time."""
    _earlier_peaks_bytes.append(peak_rss_bytes())
    base_bytes = _status_bytes("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM starts anew: proc(5)
    yield lambda: _status_bytes("VmHWM") - base_bytes


_earlier_peaks_bytes = [0]


def _status_bytes(field: str) -> int:
    return _kib_field(Path("/proc/self/status"), field)


def _kib_field(path: Path, field: str) -> int:
    """A field of a file of proc(5) that counts in kB, in bytes."""
    lines = path.read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:"))
