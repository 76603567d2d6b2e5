"""Processes of ranks: what becomes of them is told, and none is left."""

import os
import signal
import sys
import time

import pytest

from llmbuild.errors import EngineError
from llmbuild.runtime.parallel import process as process_module
from llmbuild.runtime.parallel.local import LocalPeers
from llmbuild.runtime.parallel.memory import RanksMemory
from llmbuild.runtime.parallel.messages import Kind
from llmbuild.runtime.parallel.process import RankProcess, end_all

READY = """
import os, signal, socket, sys, time
from llmbuild.runtime.parallel.messages import Channel, Kind
channel = Channel(socket.socket(fileno=int(sys.argv[1])))
channel.send(Kind.READY)
"""
WAIT_S = 30


@pytest.fixture
def memory():
    return RanksMemory.create(4096)


@pytest.fixture
def start(memory):
    """start(code): a process that runs Python code; all are ended afterwards."""
    started = []

    def start(code: str) -> RankProcess:
        command = (sys.executable, "-c", code)
        started.append(RankProcess(1, [memory.descriptor], command))
        return started[-1]

    yield start
    for process in started:
        process.end()


def exists(pid: int) -> bool:
    """Also as a zombie."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.parametrize(
    ("code", "told"),
    [
        ("import os; os.kill(os.getpid(), 9)", "was ended by SIGKILL"),
        ("import os; os.kill(os.getpid(), 35)", "was ended by signal 35"),
        ("raise SystemExit(3)", "ended with status 3"),
        ("pass", "ended with status 0"),
        ("print('first'); print('last words')", "ended with status 0: last words"),
        ("raise ValueError('no luck')", "ended with status 1: ValueError: no luck"),
        (r"import os; os.write(2, b'\xff\n\n'); os.abort()", "was ended by SIGABRT: \ufffd"),
    ],
)
def test_end_of_a_process_is_told_with_its_last_words(start, code, told):
    process = start(code)
    process.wait(time.monotonic() + WAIT_S)
    assert process.how_it_ended() == told
    process.end()
    assert not exists(process.id)


INHERITED = """
import os, sys, mmap
listed = [n for n in os.listdir("/proc/self/fd") if os.path.lexists(f"/proc/self/fd/{n}")]
print({*map(int, listed)} == {0, 1, 2, *map(int, sys.argv[1:])})
mmap.mmap(int(sys.argv[2]), 4096)[4] = 7
"""


def test_process_has_the_memory_and_no_descriptor_of_another_rank(start, memory):
    first = start(READY + "time.sleep(60)")
    assert first.channel.receive(WAIT_S)[0] is Kind.READY
    second = start(INHERITED)
    second.wait(time.monotonic() + WAIT_S)
    assert second.how_it_ended() == "ended with status 0: True"
    assert memory._map[4] == 7


def test_command_that_is_missing_is_told():
    with pytest.raises(EngineError, match="can't start a process for rank 2"):
        RankProcess(2, [], ["/no/such/python"])


@pytest.mark.parametrize("is_asked", [True, False])
def test_processes_that_do_not_end_are_killed(start, is_asked, monkeypatch):
    monkeypatch.setattr(process_module, "_END_S", 0.2)
    ignoring = "signal.signal(signal.SIGTERM, signal.SIG_IGN); "
    processes = [start(READY + ignoring + "time.sleep(60)") for _ in range(3)]
    for process in processes:
        assert process.channel.receive(WAIT_S)[0] is Kind.READY
    os.kill(processes[1].id, signal.SIGSTOP)
    started_s = time.monotonic()
    end_all(processes, is_asked=is_asked)
    assert time.monotonic() - started_s < 10
    assert not any(exists(process.id) for process in processes)
    end_all(processes, is_asked=is_asked)


def test_processes_that_are_asked_get_time_to_end(start):
    process = start(READY + "channel.receive(); time.sleep(0.3); print('done')")
    assert process.channel.receive(WAIT_S)[0] is Kind.READY
    process.channel.send(Kind.CLOSE)
    process.wait(time.monotonic() + WAIT_S)
    assert process.how_it_ended() == "ended with status 0: done"


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV, signal.SIGTERM])
def test_waits_in_shared_memory_end_at_once_when_a_process_is_gone(start, memory, number):
    peers = LocalPeers(memory, timeout_s=WAIT_S)
    peers.add(1, start(READY + "time.sleep(60)"))
    peers.add(2, start(READY + "time.sleep(60)"))
    peers.wait_until_ready()
    assert memory._failed.value == 0
    os.kill(peers._processes[2].id, number)
    deadline = time.monotonic() + WAIT_S
    while memory._failed.value == 0:
        assert time.monotonic() < deadline
        time.sleep(0.001)
    assert memory._failed.value == 1 + 2
    error = peers.fail(1)
    assert error.rank == 2
    name = signal.Signals(number).name
    assert str(error).startswith(f"rank 2 (process {peers._processes[2].id}) was ended by {name}")
    assert not any(exists(process.id) for process in peers._processes.values())
    peers.close()


def test_first_rank_that_is_gone_stays_the_one_that_is_told(memory):
    memory.set_failed(3)
    memory.set_failed(1)
    assert memory._failed.value == 1 + 3


def test_memory_is_zeroed_and_nameless(memory):
    assert memory._map[:] == bytes(4096)
    assert memory.size_bytes == 4096
    assert "llmbuild ranks (deleted)" in os.readlink(f"/proc/self/fd/{memory.descriptor}")


def test_process_leaves_with_rank_0_whatever_it_is_busy_with(start):
    """Here with a sleep that nothing interrupts."""
    code = "from llmbuild.runtime.parallel.serving import leave_with\nleave_with(channel)\n"
    process = start(code.join([READY, "time.sleep(600)"]))
    assert process.channel.receive(WAIT_S)[0] is Kind.READY
    process.channel.close()
    process.wait(time.monotonic() + WAIT_S)
    assert process.how_it_ended() == "ended with status 1"
