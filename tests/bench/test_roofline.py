"""The roofline's arithmetic against values computed by hand, and its plot."""

import importlib.util
from pathlib import Path

import pytest

from bench import roofline
from bench.machine import Machine, best_roofs
from bench.roofline import Point, Roofs, Work
from llmbuild.errors import UserError

ROOFS = Roofs(memory_bytes=50.0, cache_bytes=200.0, operations=1000.0, int8_operations=4000.0)


@pytest.mark.parametrize(
    ("work", "bound_s", "bound_by"),
    [
        (Work(cold_bytes=100, warm_bytes=100, operations=1000), 2.0, "memory"),
        (Work(cold_bytes=100, warm_bytes=600, operations=1000), 3.0, "cache"),
        (Work(cold_bytes=100, warm_bytes=100, operations=4000), 4.0, "compute"),
        (Work(cold_bytes=100, operations=1000, int8_operations=12000), 3.0, "int8"),
    ],
)
def test_bound_is_the_slowest_roof(work: Work, bound_s: float, bound_by: str) -> None:
    assert ROOFS.bound_s(work) == bound_s
    assert ROOFS.bound_by(work) == bound_by


def test_fraction_is_the_bound_over_the_time_taken() -> None:
    assert ROOFS.fraction(Work(cold_bytes=100), seconds=8.0) == 0.25


def test_work_adds_up_part_by_part() -> None:
    assert Work(1, 2, 3, 4) + Work(10, 20, 30, 40) == Work(11, 22, 33, 44)
    assert Work(1, 2, 3, 4).all_operations == 7


def test_best_roofs_take_the_higher_of_each() -> None:
    def machine(memory: float, cache: float, fp32: float, int8: float) -> Machine:
        reads = {"1 MiB": cache, "24 MiB": 0.0, "80 MiB": 0.0, "1 GiB": memory}
        peaks = {"fp32": fp32, "bf16": None, "int8": int8}
        return Machine("cpu", 2, "x86-64-v3", "g++", "today", 0.0, reads, peaks, 1e-7)

    a, b = machine(1.0, 5.0, 2.0, 6.0), machine(3.0, 4.0, 1.0, 8.0)
    assert best_roofs(a, b) == Roofs(3.0, 5.0, 2.0, 8.0)


def test_plot_names_every_group(tmp_path: Path) -> None:
    path = tmp_path / "roofline.svg"
    points = [Point("fast", Work(10, 0, 20), 0.5), Point("slow", Work(0, 10, 20), 5.0)]
    roofline.plot(path, "a title", ROOFS, {"int8": 4000.0}, points)
    drawn = path.read_text()
    for text in ("a title", "fast", "slow", "int8 peak"):
        assert f"<!-- {text} -->" in drawn


def test_plot_without_matplotlib_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"matplotlib.*pip install"):
        roofline.check_can_plot()
