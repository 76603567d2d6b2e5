"""The runner's side of a driver, against drivers that answer, fail, hang, die and chatter."""

import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from bench.peers.protocol import Driver, DriverError

SETUP = '{"threads": 1, "processors": [0], "max_sequence": 64, "max_requests": 2, "kv_tokens": 128}'
ENGINE = """
import os, sys, time
from bench.peers.drivers.line_protocol import Generation, serve

class Fake:
    versions = "fake 1"
    load_s = None
    pid = os.getpid()

    def __init__(self, model, setup):
        assert (model, setup.kv_tokens) == ("a model", 128)
        {loading}

    def generate(self, prompts, new_tokens):
        print("chatter", flush=True)
        if prompts[0] == [7]:
            {answering}
        return Generation(0.5, 2.0, list(new_tokens))

serve(Fake)
"""
Start = Callable[..., Driver]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """start(loading=..., answering=...): what the fake engine does then; [7] asks for it."""
    started = []

    def begin(loading: str = "pass", answering: str = "pass", limit_s: float = 20) -> Driver:
        code = ENGINE.format(loading=loading, answering=answering)
        command = [sys.executable, "-c", code, "a model", SETUP]
        started.append(Driver(command, tmp_path / "driver.log", limit_s))
        return started[-1]

    yield begin
    for driver in started:
        driver.close()


def run(*prompts: list[int], repeats: int = 1) -> dict[str, object]:
    return {
        "do": "run",
        "prompts": list(prompts),
        "new_tokens": [3] * len(prompts),
        "repeats": repeats,
    }


def state(driver: Driver) -> str:
    return Path(f"/proc/{driver.group}/stat").read_text().rpartition(")")[2].split()[0]


def wait_for_state(driver: Driver, wanted: str) -> None:
    end = time.perf_counter() + 5
    while state(driver) != wanted and time.perf_counter() < end:
        time.sleep(0.01)
    assert state(driver) == wanted


def test_answers_come_through_whatever_the_engine_prints(start: Start, tmp_path: Path) -> None:
    driver = start()
    assert driver.ready["versions"] == "fake 1"
    reply = driver.ask(run([1], [2], repeats=2), 20)
    assert reply == {"first_s": [0.5, 0.5], "total_s": [2.0, 2.0]}
    assert "chatter" in (tmp_path / "driver.log").read_text()


def test_load_time_lasts_until_the_first_token(start: Start) -> None:
    assert 0.3 <= start(loading="time.sleep(0.3)").load_s < 20


def test_load_time_of_an_engine_in_a_process_of_its_own_is_what_it_says(start: Start) -> None:
    assert start(loading="self.load_s = 0.125; time.sleep(0.3)").load_s == 0.125


def test_memory_is_that_of_the_engine(start: Start) -> None:
    driver = start(loading="self.held = bytearray(os.urandom(1 << 20) * 64)")
    memory = driver.ask({"do": "memory"}, 20)
    assert 64 << 20 <= memory["resident_bytes"] <= memory["peak_bytes"] < 1 << 30


def test_driver_is_stopped_unless_it_is_asked(start: Start) -> None:
    driver = start()
    wait_for_state(driver, "T")
    driver.ask(run([1]), 20)
    wait_for_state(driver, "T")


def test_error_in_one_request_leaves_the_driver_to_others(start: Start) -> None:
    driver = start(answering='raise ValueError("no room")')
    with pytest.raises(DriverError, match="ValueError: no room") as caught:
        driver.ask(run([7]), 20)
    assert not caught.value.is_over
    assert driver.ask(run([1]), 20)["total_s"] == [2.0]


def test_fewer_tokens_than_asked_for_are_an_error(start: Start) -> None:
    driver = start(answering="return Generation(0.5, 2.0, [1])")
    with pytest.raises(DriverError, match=r"\[1\] output tokens where \[3\] were asked"):
        driver.ask(run([7]), 20)


def test_hanging_driver_is_ended_at_the_limit(start: Start) -> None:
    driver = start(answering="time.sleep(600)")
    begin = time.perf_counter()
    with pytest.raises(DriverError, match=r"no answer in 0\.5 s") as caught:
        driver.ask(run([7]), 0.5)
    assert caught.value.is_over
    assert time.perf_counter() - begin < 10
    assert not Path(f"/proc/{driver.group}").exists()


def test_driver_that_dies_is_named_with_its_last_words(start: Start) -> None:
    driver = start(answering='print("out of luck", flush=True); os._exit(3)')
    with pytest.raises(DriverError, match="it ended with 3: out of luck") as caught:
        driver.ask(run([7]), 20)
    assert caught.value.is_over


def test_driver_that_died_while_stopped_is_an_error_too(start: Start) -> None:
    driver = start()
    driver._signal(9)
    with pytest.raises(DriverError, match="it ended with -9"):
        driver.ask(run([1]), 20)


def test_driver_that_hangs_or_dies_while_loading_is_an_error(start: Start) -> None:
    with pytest.raises(DriverError, match="no answer in"):
        start(loading="time.sleep(600)", limit_s=0.5)
    with pytest.raises(DriverError, match="RuntimeError: no such model"):
        start(loading='raise RuntimeError("no such model")')


def test_closing_ends_the_processes_that_the_engine_started(start: Start, tmp_path: Path) -> None:
    noted = tmp_path / "pid"
    driver = start(
        loading="import subprocess; child = subprocess.Popen(['sleep', '600']); "
        f"open({str(noted)!r}, 'w').write(str(child.pid))"
    )
    child = Path("/proc") / noted.read_text()
    assert child.exists()
    driver.close()
    driver.close()
    end = time.perf_counter() + 5
    while child.exists() and " Z " not in (child / "stat").read_text():
        assert time.perf_counter() < end
        time.sleep(0.01)
