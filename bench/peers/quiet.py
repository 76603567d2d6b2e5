"""What else runs on this machine: waited for before a measurement, and noted during it."""

import os
import time
from dataclasses import dataclass
from pathlib import Path

CLOCK_HZ = os.sysconf("SC_CLK_TCK")
QUIET = 0.1  # processors that others may use
WINDOW_S = 0.3


def busy_s() -> float:
    """Seconds, since the start of the machine, that processors were busy or taken by a host."""
    fields = Path("/proc/stat").read_text().splitlines()[0].split()[1:]
    user, nice, system, _idle, _iowait, *others = map(int, fields[:8])  # irq, softirq, steal
    return (user + nice + system + sum(others)) / CLOCK_HZ


def group_s(group: int) -> float:
    """Seconds of all living processes of a process group and of their children that ended."""
    ticks = 0
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:  # it has ended
            continue
        if int(fields[2]) == group:
            ticks += sum(map(int, fields[11:15]))
    return ticks / CLOCK_HZ


def wait_until_quiet(limit_s: float) -> bool:
    """Whether, within that time, all processes together used next to nothing for a moment."""
    end = time.perf_counter() + limit_s
    while True:
        start, busy = time.perf_counter(), busy_s()
        time.sleep(WINDOW_S)
        if busy_s() - busy <= QUIET * (time.perf_counter() - start):
            return True
        if time.perf_counter() > end:
            return False


@dataclass
class Others:
    """What processes outside a group used since this was made: `processors` of them, on average."""

    group: int

    def __post_init__(self) -> None:
        self._start, self._before = time.perf_counter(), busy_s() - group_s(self.group)

    def processors(self) -> float:
        used = busy_s() - group_s(self.group) - self._before
        return max(0.0, used) / (time.perf_counter() - self._start)
