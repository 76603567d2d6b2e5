"""A plan's build ends at a signal that comes while TensorRT runs."""

import signal
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from llmbuild.builder.targets.tensorrt.serialise import serialise
from llmbuild.errors import BuildError

STEPS = 5
LOG: Any = SimpleNamespace(text=lambda: "no reason")


class Interrupted(Exception):
    pass


@pytest.fixture
def handled() -> Iterator[None]:
    """SIGTERM raises Interrupted."""

    def handle(number: int, frame: object) -> None:
        raise Interrupted

    before = signal.signal(signal.SIGTERM, handle)
    yield
    signal.signal(signal.SIGTERM, before)


class Builder:
    """Runs steps until the monitor says no; what a callback raises is lost, as in TensorRT."""

    def __init__(self, signalled_step: int | None, signals: int = 1) -> None:
        self.signalled_step, self.signals, self.steps = signalled_step, signals, 0

    def build_serialized_network(self, network: object, settings: Any) -> bytes | None:
        for step in range(STEPS):
            self.steps += 1
            try:
                for _ in range(self.signals if step == self.signalled_step else 0):
                    signal.raise_signal(signal.SIGTERM)
            except Interrupted:
                pass
            if not settings.progress_monitor.step_complete("a phase", step):
                return None
        return b"plan"


TRT = SimpleNamespace(IProgressMonitor=object)


@pytest.mark.parametrize("signals", [1, 2])
@pytest.mark.usefixtures("handled")
def test_a_signal_ends_the_build_after_the_step(signals: int) -> None:
    builder = Builder(2, signals)
    with pytest.raises(Interrupted):
        serialise(TRT, builder, None, SimpleNamespace(), LOG)
    assert builder.steps == 3


def test_a_build_that_nothing_interrupts_gives_its_plan() -> None:
    assert serialise(TRT, Builder(None), None, SimpleNamespace(), LOG) == b"plan"


def test_a_plan_that_cannot_be_built_is_told_with_the_log() -> None:
    builder = SimpleNamespace(build_serialized_network=lambda network, settings: None)
    with pytest.raises(BuildError, match="can't build the plan: no reason"):
        serialise(TRT, builder, None, SimpleNamespace(), LOG)
