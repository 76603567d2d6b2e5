"""The roofline: the least time that a machine needs for some work, and a plot of it.

Williams, Waterman and Patterson, "Roofline: an insightful visual performance model", 2009.
"""

import importlib.util
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from llmbuild.errors import UserError


@dataclass(frozen=True)
class Work:
    """What has to be moved and computed, each byte counted once.

    cold_bytes: weights and KV, which come from memory in a real step. warm_bytes: activations,
    which the operation before left in a cache. operations: additions, multiplications, divisions
    and function values of fp32, one each. int8_operations: those of dots of bytes.
    """

    cold_bytes: int = 0
    warm_bytes: int = 0
    operations: int = 0
    int8_operations: int = 0

    @property
    def all_operations(self) -> int:
        return self.operations + self.int8_operations

    def __add__(self, other: "Work") -> "Work":
        return Work(
            self.cold_bytes + other.cold_bytes,
            self.warm_bytes + other.warm_bytes,
            self.operations + other.operations,
            self.int8_operations + other.int8_operations,
        )


@dataclass(frozen=True)
class Roofs:
    """What a machine reaches; per second."""

    memory_bytes: float
    cache_bytes: float
    operations: float
    int8_operations: float = math.inf

    def seconds(self, work: Work) -> dict[str, float]:
        """The least time by each of the roofs."""
        return {
            "memory": work.cold_bytes / self.memory_bytes,
            "cache": work.warm_bytes / self.cache_bytes,
            "compute": work.operations / self.operations,
            "int8": work.int8_operations / self.int8_operations,
        }

    def bound_s(self, work: Work) -> float:
        """The least time for work whose transfers and operations all overlap."""
        return max(self.seconds(work).values())

    def bound_by(self, work: Work) -> str:
        seconds = self.seconds(work)
        return max(seconds, key=lambda roof: seconds[roof])

    def fraction(self, work: Work, seconds: float) -> float:
        """Of the bound that `seconds` reaches; 1 is as fast as the machine can."""
        return self.bound_s(work) / seconds


@dataclass(frozen=True)
class Point:
    """A measurement on the plot; it must have bytes and operations."""

    group: str
    work: Work
    seconds: float


def check_can_plot() -> None:
    """Raises UserError when what draws isn't installed."""
    if importlib.util.find_spec("matplotlib") is None:
        raise UserError(
            "--plot needs matplotlib, which isn't installed; `pip install -e '.[build,bench]'` in "
            "llmbuild's checkout has it"
        )


def plot(
    path: Path, title: str, roofs: Roofs, peaks: Mapping[str, float], points: Sequence[Point]
) -> None:
    """Draws operations per second over operations per byte into `path`, an SVG or PNG file.

    peaks: further multiply peaks, which are drawn as lines alone.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(9, 6))
    intensities = [2.0**exponent for exponent in range(-5, 13)]
    for name, bandwidth in (("memory", roofs.memory_bytes), ("cache", roofs.cache_bytes)):
        heights = [min(roofs.operations, x * bandwidth) / 1e9 for x in intensities]
        axes.plot(intensities, heights, label=f"{name}, {bandwidth / 1e9:.0f} GB/s")
    for name, peak in peaks.items():
        axes.axhline(peak / 1e9, linestyle=":", color="grey")
        axes.annotate(f"{name} peak", (intensities[0], peak / 1e9), va="bottom", fontsize=8)
    for index, group in enumerate(sorted({point.group for point in points})):
        members = [point for point in points if point.group == group]
        moved = [point.work.cold_bytes + point.work.warm_bytes for point in members]
        axes.scatter(
            [point.work.all_operations / size for point, size in zip(members, moved, strict=True)],
            [point.work.all_operations / point.seconds / 1e9 for point in members],
            label=group,
            marker="osD^vPX*<>dphH8"[index % 15],
            s=18,
            zorder=3,
        )
    axes.set(xscale="log", yscale="log", xlabel="operations per byte", ylabel="Gop/s", title=title)
    axes.legend(fontsize=7, ncols=2)
    figure.savefig(path)
    pyplot.close(figure)
