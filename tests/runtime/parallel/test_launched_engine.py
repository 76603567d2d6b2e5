"""An engine of four ranks that a launcher has started one by one, as on four hosts: over TCP."""

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest

from llmbuild import LLM, SamplingParams
from llmbuild.runtime.manifest import encode, read_manifest, seal
from llmbuild.runtime.parallel.hosts import choose_own_seat
from llmbuild.runtime.parallel.processors import Seat
from llmbuild.runtime.parallel.rendezvous import Place, listen

WAIT_S = 60  # for what should take far less on any machine
SCRIPT = """
import sys
from llmbuild import LLM, SamplingParams
from llmbuild.errors import RankError
llm = LLM(sys.argv[1], num_threads=1, num_blocks=70, rank_timeout_s=float(sys.argv[2]))
LONG = SamplingParams(max_tokens=50, ignore_eos=True)
print("open", flush=True)
"""
GENERATE = """
for prompts in ([[1], [7, 8, 9], [200, 3]], [[5]]):
    for completion in llm.generate(prompts, LONG):
        print(*completion.token_ids, flush=True)
llm.close()
"""
GENERATE_FOR_EVER = """
try:
    while True:
        llm.generate([[1], [7, 8, 9], [200, 3]], LONG)
except RankError as error:
    print(error.rank, error)
"""

Script = subprocess.Popen[str]


@pytest.fixture
def launch(engine_of_ranks: Path) -> Iterator[Callable[..., list[Script]]]:
    """launch(code, timeout_s=60, **engines by rank3=, ...): a process for each rank, which runs
    code once it has opened the engine."""
    processes: list[Script] = []

    def launch(code: str, timeout_s: float = 60, **engines: Path) -> list[Script]:
        with listen(0) as free:
            port = free.getsockname()[1]
        for rank in range(4):
            said = {"RANK": str(rank), "WORLD_SIZE": "4"}
            said |= {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
            engine = engines.get(f"rank{rank}", engine_of_ranks)
            process = subprocess.Popen(
                [sys.executable, "-c", SCRIPT + code, str(engine), str(timeout_s)],
                env=os.environ | said,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            processes.append(process)
        return processes

    yield launch
    for process in processes:
        process.kill()
        process.communicate()


def results(processes: list[Script]) -> list[tuple[int, str, str]]:
    """The status of each, and what it has said and complained of."""
    outputs = [process.communicate(timeout=WAIT_S) for process in processes]
    return [(p.returncode, *output) for p, output in zip(processes, outputs, strict=True)]


def test_tokens_are_those_of_an_engine_of_one_rank(
    launch: Callable[..., list[Script]], tiny_engine: Path
) -> None:
    with LLM(tiny_engine) as alone:
        params = SamplingParams(max_tokens=50, ignore_eos=True)
        expected = [c.token_ids for c in alone.generate([[1], [7, 8, 9], [200, 3], [5]], params)]
    (status, said, _), *others = results(launch(GENERATE))
    assert status == 0
    lines = said.splitlines()
    assert lines[0] == "open"
    assert [tuple(map(int, line.split())) for line in lines[1:]] == expected
    for status, said, complaint in others:
        assert (status, said) == (0, "")  # they never come past LLM(...)
        assert "Traceback" not in complaint


@pytest.mark.parametrize("rank", [1, 2, 3])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_lost_rank_is_named_and_all_end(
    launch: Callable[..., list[Script]], rank: int, number: signal.Signals
) -> None:
    """One that is gone at once, one that is stuck after a second."""
    processes = launch(GENERATE_FOR_EVER, timeout_s=60 if number == signal.SIGKILL else 1)
    assert processes[0].stdout.readline() == "open\n"
    time.sleep(0.3)
    processes[rank].send_signal(number)
    started_s = time.monotonic()
    lost = processes.pop(rank)
    (status, said, _), *others = results(processes)
    assert time.monotonic() - started_s < WAIT_S / 2
    how = "is gone" if number == signal.SIGKILL else "didn't answer within 1 s (rank_timeout_s)"
    assert said.startswith(f"{rank} rank {rank} (at localhost) {how}; all ranks were stopped")
    assert status == 0
    for status, said, complaint in others:
        assert (status, said) == (1, "")
        assert complaint.splitlines()[-1].startswith("Error: rank ")
        assert "Traceback" not in complaint
    processes.append(lost)


@pytest.mark.parametrize("code", [GENERATE_FOR_EVER, "import time; time.sleep(600)"])
def test_ranks_end_when_rank_0_is_killed(launch: Callable[..., list[Script]], code: str) -> None:
    processes = launch(code)
    assert processes[0].stdout.readline() == "open\n"
    time.sleep(0.2)
    processes[0].kill()
    for status, said, complaint in results(processes)[1:]:
        assert (status, said) == (1, "")
        assert "Traceback" not in complaint


def test_rank_with_another_engine_is_refused_with_both_digests(
    launch: Callable[..., list[Script]], engine_of_ranks: Path, tmp_path: Path
) -> None:
    other = tmp_path / "engine"
    shutil.copytree(engine_of_ranks, other)
    manifest = read_manifest(other)
    changed = seal(msgspec.structs.replace(manifest, name="another"))
    (other / "manifest.json").write_bytes(encode(changed))
    for status, said, complaint in results(launch(GENERATE, rank3=other)):
        assert (status, said) == (1, "")
        assert "EngineError: rank 3 runs the engine with digest" in complaint
        assert manifest.digest in complaint
        assert changed.digest in complaint


def test_other_number_of_processes_than_ranks_is_one_line(
    engine_of_ranks: Path, run_llmbuild: Callable[..., subprocess.CompletedProcess[str]]
) -> None:
    done = run_llmbuild("generate", engine_of_ranks, "a", RANK="0", WORLD_SIZE="3")
    assert done.returncode == 2
    assert done.stderr.startswith("Error: WORLD_SIZE is 3, but the engine has 4 ranks")
    assert done.stderr.count("\n") == 1


def test_ranks_share_the_processors_that_a_launcher_has_left_to_them_together() -> None:
    both, mine = [4, 5, 6, 7], [8, 9]
    places = [
        Place("a", 1, "host a", both),
        Place("b", 1, "host b", both),
        Place("a", 2, "host a", both),
        Place("a", 3, "host a", mine),
    ]
    seats = [choose_own_seat(places, rank, None, None) for rank in range(4)]
    assert seats == [
        Seat(2, True, (4, 5)),
        Seat(4, True, (4, 5, 6, 7)),
        Seat(2, True, (6, 7)),
        Seat(2, True, (8, 9)),
    ]
