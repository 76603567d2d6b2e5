"""Interrupts come between steps, and never between a request's entry and the record of it."""

import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from llmbuild import LLM, SamplingParams
from llmbuild.runtime.interrupts import deferred_interrupts
from llmbuild.runtime.loop import Request

FEW = SamplingParams(max_tokens=5)


@pytest.fixture(autouse=True)
def interrupts() -> Iterator[None]:
    """As in a terminal, wherever the tests run: a shell's background job ignores SIGINT."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def interrupt() -> None:
    signal.raise_signal(signal.SIGINT)


def test_an_interrupt_waits_for_the_end() -> None:
    done = []
    with pytest.raises(KeyboardInterrupt):  # noqa: PT012
        with deferred_interrupts():
            interrupt()
            done.append("all")
        done.append("beyond")
    assert done == ["all"]


def test_the_second_does_not_wait() -> None:
    done = []
    with pytest.raises(KeyboardInterrupt), deferred_interrupts():  # noqa: PT012
        interrupt()
        done.append("first")
        interrupt()
        done.append("second")
    assert done == ["first"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_an_inner_one_leaves_it_to_the_outer_one() -> None:
    done = []
    with pytest.raises(KeyboardInterrupt), deferred_interrupts():  # noqa: PT012
        with deferred_interrupts():
            interrupt()
        done.append("outer")
    assert done == ["outer"]


def test_an_error_is_not_hidden_by_it() -> None:
    with pytest.raises(KeyboardInterrupt) as raised, deferred_interrupts():  # noqa: PT012
        interrupt()
        raise ValueError
    assert isinstance(raised.value.__context__, ValueError)


@pytest.mark.parametrize("handler", [signal.SIG_IGN, signal.SIG_DFL])
def test_what_python_does_not_handle_is_left(handler: signal.Handlers) -> None:
    signal.signal(signal.SIGINT, handler)
    with deferred_interrupts():
        assert signal.getsignal(signal.SIGINT) is handler


def test_other_threads_do_nothing() -> None:
    handlers = []

    def enter() -> None:
        with deferred_interrupts():
            handlers.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    assert handlers == [signal.default_int_handler]


def test_a_step_is_done_whole(tiny_engine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with LLM(tiny_engine) as llm:
        step, done = llm._loop.step, []

        def interrupted_step() -> None:
            interrupt()
            step()
            done.append(1)

        monkeypatch.setattr(llm._loop, "step", interrupted_step)
        with pytest.raises(KeyboardInterrupt):
            llm.generate([1, 2], FEW)
        assert done == [1]
        llm.check()


@pytest.mark.parametrize(
    "call",
    [
        lambda llm: llm.generate([1, 2], FEW),
        lambda llm: llm.generate([[1, 2], [3]], FEW),
        lambda llm: next(llm.stream([1, 2], FEW)),
    ],
    ids=["one", "several", "stream"],
)
def test_no_request_is_left_behind(
    tiny_engine: Path, monkeypatch: pytest.MonkeyPatch, call: Callable[[LLM], object]
) -> None:
    """One that comes just after a request is in the loop, before the caller knows of it."""
    with LLM(tiny_engine) as llm:
        submit, submitted = llm._loop.submit, []

        def interrupted_submit(*arguments: Any) -> Request:
            request = submit(*arguments)
            submitted.append(request.sequence.finish_reason)
            if len(submitted) == 1:
                interrupt()
            return request

        monkeypatch.setattr(llm._loop, "submit", interrupted_submit)
        with pytest.raises(KeyboardInterrupt):
            call(llm)
        assert submitted[0] is None
        assert not llm._loop._requests
        llm.check()
