"""An engine of four ranks on this host: it computes what one rank does, whatever becomes of its
processes is told, and none of them is left."""

import gc
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from llmbuild import LLM, SamplingParams
from llmbuild.errors import EngineError, RankError, UserError
from llmbuild.runtime.api import Stream
from llmbuild.runtime.engine import open_engine
from llmbuild.runtime.executors.open import open_executor
from llmbuild.runtime.replay import STEPS_FILE, load_steps, replay

WAIT_S = 30  # for what should take far less on any machine
LONG = SamplingParams(max_tokens=50, ignore_eos=True)
PROMPTS = [[1], [7, 8, 9], [*range(40, 53)], [200, 3]]


@pytest.fixture
def llm(engine_of_ranks: Path) -> Iterator[LLM]:
    with LLM(engine_of_ranks, num_blocks=70) as llm:
        yield llm


def processes(llm: LLM) -> dict[int, int]:
    """The process of each rank but 0."""
    return {rank: each.id for rank, each in llm._executor._peers._processes.items()}


def exists(pid: int) -> bool:
    """Also as a zombie."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def await_end(pids: list[int]) -> None:
    deadline = time.monotonic() + WAIT_S
    while any(map(exists, pids)):
        assert time.monotonic() < deadline, "a process is left"
        time.sleep(0.01)


def test_tokens_are_those_of_an_engine_of_one_rank(llm: LLM, tiny_engine: Path) -> None:
    params = [LONG, LONG, SamplingParams(max_tokens=20), LONG]
    with LLM(tiny_engine) as alone:
        expected = [c.token_ids for c in alone.generate(PROMPTS, params)]
    assert [c.token_ids for c in llm.generate(PROMPTS, params)] == expected
    assert [llm.generate(p, own).token_ids for p, own in zip(PROMPTS, params, strict=True)] == (
        expected
    )


def test_logits_are_those_of_an_engine_of_one_rank(
    engine_of_ranks: Path, tiny_engine: Path
) -> None:
    """Of the steps that engines are verified with: prompts in chunks, mixed steps, decode."""
    steps = load_steps(tiny_engine / STEPS_FILE)
    assert any(batch.is_decode and batch.num_sequences > 1 for batch in steps.batches)
    expected = replay(open_engine(tiny_engine), steps)
    logits = replay(open_engine(engine_of_ranks), steps)
    for own, other in zip(logits, expected, strict=True):
        np.testing.assert_allclose(own, other, atol=1e-4)


def test_kv_bytes_are_those_of_all_ranks(llm: LLM, tiny_engine: Path) -> None:
    with LLM(tiny_engine, num_blocks=70) as alone:
        heads = [rank.layers.count * rank.kv_heads.count for rank in llm.manifest.ranks]
        assert llm.kv_bytes == alone.kv_bytes * sum(heads) // (2 * 2)


def test_processes_end_with_the_engine(engine_of_ranks: Path) -> None:
    for how in ("close", "drop"):
        llm = LLM(engine_of_ranks)
        pids = [*processes(llm).values()]
        assert len(pids) == 3
        assert all(map(exists, pids))
        if how == "close":
            llm.close()
            assert not any(map(exists, pids))
            llm.close()
        else:
            del llm
            gc.collect()
            assert not any(map(exists, pids))


def test_processors_of_this_thread_stay_as_they_are(engine_of_ranks: Path) -> None:
    before = os.sched_getaffinity(0)
    with LLM(engine_of_ranks) as llm:
        assert os.sched_getaffinity(0) == before
        runs = [os.sched_getaffinity(pid) for pid in processes(llm).values()]
    if len(before) >= 4:
        assert sum(map(len, runs)) == len(set().union(*runs)) < len(before)
    else:
        assert runs == [before] * 3


@pytest.mark.parametrize("rank", [1, 2, 3])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV])
def test_killed_rank_ends_all_requests_and_is_named(
    llm: LLM, rank: int, number: signal.Signals
) -> None:
    """In the middle of steps. (By default a rank is waited for much longer than this takes.)"""
    pids = processes(llm)
    bystanders: list[Stream] = []

    def generate() -> None:
        bystanders.append(llm.stream([5], LONG))
        llm.generate(PROMPTS, LONG)

    def generate_for_ever() -> None:
        while True:
            generate()

    generate()
    threading.Timer(0.2, os.kill, (pids[rank], number)).start()
    started_s = time.monotonic()
    with pytest.raises(RankError) as caught:
        generate_for_ever()
    assert time.monotonic() - started_s < WAIT_S
    assert caught.value.rank == rank
    said = f"rank {rank} (process {pids[rank]}) was ended by {number.name}"
    assert said in str(caught.value)
    assert [stream.completion.finish_reason for stream in bystanders[-2:]] == ["length", "error"]
    assert said in bystanders[-1].completion.error
    assert not any(map(exists, pids.values()))
    with pytest.raises(RankError, match="open the engine again"):
        llm.generate([1], LONG)


@pytest.mark.parametrize("rank", [1, 2, 3])
def test_stuck_rank_is_given_up_after_the_time_that_was_given(
    engine_of_ranks: Path, rank: int
) -> None:
    with LLM(engine_of_ranks, rank_timeout_s=0.5) as llm:
        llm.generate(PROMPTS, LONG)
        pids = processes(llm)
        os.kill(pids[rank], signal.SIGSTOP)
        started_s = time.monotonic()
        with pytest.raises(RankError) as caught:
            llm.generate(PROMPTS, LONG)
        assert 0.4 < time.monotonic() - started_s < WAIT_S
        said = rf"rank {rank} (process {pids[rank]}) didn't answer within 0.5 s"
        assert said in str(caught.value)
        assert not any(map(exists, pids.values()))


def test_rank_without_its_files_is_named(engine_of_ranks: Path, tmp_path: Path) -> None:
    root = tmp_path / "engine"
    shutil.copytree(engine_of_ranks, root)
    engine = open_engine(root)
    (root / engine.manifest.ranks[2].weights).unlink()
    with pytest.raises(EngineError, match=r"rank 2: .*rank2/weights\.safetensors can't be mapped"):
        open_executor(engine, 4)


def test_llm_that_does_not_come_up_leaves_no_process(
    engine_of_ranks: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither where rank 0 itself can't be opened, nor where another can't."""
    started: list[int] = []
    popen = subprocess.Popen

    def noted(*arguments: object, **options: object) -> subprocess.Popen[bytes]:
        started.append((process := popen(*arguments, **options)).pid)
        return process

    monkeypatch.setattr(subprocess, "Popen", noted)
    engine = open_engine(engine_of_ranks)
    for blocks in (1 << 40, 1 << 52):
        with pytest.raises(EngineError, match="kv_memory"):
            open_executor(engine, blocks)
    assert len(started) == 6
    assert not any(map(exists, started))


def test_forked_process_can_do_nothing_and_disturbs_nothing(llm: LLM) -> None:
    expected = llm.generate([1, 2], LONG).token_ids
    child = os.fork()
    if child == 0:
        code = 1
        try:
            llm.generate([1], LONG)
        except UserError as error:
            code = 0 if "forked" in str(error) else 2
        llm.close()
        os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert llm.generate([1, 2], LONG).token_ids == expected


def test_lost_rank_is_one_line_to_the_command_line() -> None:
    code = """
import llmbuild.cli as command_line
from llmbuild.errors import RankError
def fail(): raise RankError(2, "rank 2 is gone")
command_line.cli = fail
command_line.main()
"""
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (1, "", "Error: rank 2 is gone\n")


# What a script does: it says which processes its ranks are, and goes on.
OPEN = """
import os, signal, sys, time
from llmbuild import LLM, SamplingParams
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it
llm = LLM(sys.argv[1])
LONG = SamplingParams(max_tokens=50, ignore_eos=True)
print(*(each.id for each in llm._executor._peers._processes.values()), flush=True)
"""
GENERATE = "while True: llm.generate([[1], [2, 3], [4]], LONG)\n"


@pytest.fixture
def start(
    engine_of_ranks: Path,
) -> Iterator[Callable[..., tuple[subprocess.Popen[str], list[int]]]]:
    """start(code): a script that has opened the engine, and the processes of its ranks."""
    scripts = []

    def start(code: str) -> tuple[subprocess.Popen[str], list[int]]:
        command = [sys.executable, "-c", OPEN + code, str(engine_of_ranks)]
        script = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        scripts.append(script)
        return script, [int(pid) for pid in script.stdout.readline().split()]

    yield start
    for script in scripts:
        script.kill()
        script.communicate()


FORK = """
if os.fork() == 0:
    os.setsid()
    os.closerange(0, 3)
time.sleep(20)
"""


@pytest.mark.parametrize("code", [GENERATE, "time.sleep(600)", FORK])
def test_ranks_end_when_rank_0_is_killed(start: Callable[..., object], code: str) -> None:
    """In steps and between them, and also where a fork of it lives on."""
    script, pids = start(code)
    time.sleep(0.3)
    assert all(map(exists, pids))
    script.kill()
    script.wait()
    started_s = time.monotonic()
    await_end(pids)
    assert time.monotonic() - started_s < 10


@pytest.mark.parametrize(
    "code", ["", "sys.exit(0)", "raise ValueError", "os.kill(os.getpid(), 15)"]
)
def test_ranks_end_with_the_script_whatever_it_ends_by(
    start: Callable[..., object], code: str
) -> None:
    script, pids = start(code)
    _, said = script.communicate(timeout=WAIT_S)
    await_end(pids)
    assert said.count("Traceback") == code.startswith("raise")


def test_interrupt_from_the_terminal_is_for_rank_0_alone(start: Callable[..., object]) -> None:
    """Ctrl-C goes to all processes of the group; the engine can be used afterwards."""
    script, pids = start(
        f"""
for _ in range(3):
    try:
        print("go", flush=True)
        {GENERATE}
    except KeyboardInterrupt:
        print(len(llm.generate([9], LONG).token_ids), flush=True)
llm.close()
"""
    )
    for _ in range(3):
        assert script.stdout.readline() == "go\n"
        time.sleep(0.2)
        os.killpg(script.pid, signal.SIGINT)
        assert script.stdout.readline() == "50\n"
    out, said = script.communicate(timeout=WAIT_S)
    assert out == ""
    assert "Traceback" not in said
    assert script.returncode == 0
    assert not any(map(exists, pids))
