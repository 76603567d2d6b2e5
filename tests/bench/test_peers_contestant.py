"""Engines in a comparison: what one that fails costs, and that quiet runs count."""

import sys
import time
from collections.abc import Iterator
from pathlib import Path
from subprocess import PIPE, Popen

import pytest

from bench.peers import contestant, quiet, run
from bench.peers.contestant import Contestant, Visit
from bench.peers.drivers.line_protocol import Setup
from bench.peers.variants import Variant
from bench.peers.work_folder import Unavailable, WorkFolder
from bench.peers.workload import Case
from llmbuild.errors import UserError

ENGINE = """
import os, time
from bench.peers.drivers.line_protocol import Generation, serve

class Fake:
    versions, load_s, pid = "fake 1", 0.25, os.getpid()

    def __init__(self, model, setup):
        self.told = open(model).read()
        if self.told == "no start":
            raise RuntimeError("no engine here")

    def generate(self, prompts, new_tokens):
        if len(prompts) == 2:
            if self.told == "die": os._exit(5)
            if self.told == "hang": time.sleep(600)
        return Generation(0.5, 2.5, list(new_tokens))

serve(Fake)
"""
SETUP = Setup(1, [0], 64, 2, 128)
ALONE = Case("alone", "decode", [[1, 2]], [5])
TOGETHER = Case("together", "serving", [[1, 2], [3]], [5, 7])


class Contest:
    """Contestants whose engine does what the content of its model says."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.begun = folder, list[Contestant]()

    def __call__(self, told: str) -> Contestant:
        model = self.folder / told
        model.write_text(told)
        variant = Variant(told, "llmbuild", told, "int8", 2)
        self.begun.append(Contestant(variant, model, SETUP, WorkFolder(self.folder), 0))
        return self.begun[-1]


@pytest.fixture
def contest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Contest]:
    command = [sys.executable, "-c", ENGINE]
    monkeypatch.setattr(contestant, "driver_command", lambda peer, work: command)
    monkeypatch.setattr(contestant, "RUN_LIMIT_S", 1)
    monkeypatch.setattr(contestant, "FREE_GB", 0)
    monkeypatch.setattr(contestant, "wait_until_quiet", lambda limit_s: True)
    made = Contest(tmp_path)
    yield made
    for each in made.begun:
        each.close()


def say(line: str) -> None:
    pass


def test_visits_give_rates_load_time_and_memory(contest: Contest) -> None:
    each = contest("work")
    each.start()
    each.visit(ALONE)
    each.visit(TOGETHER)
    each.note_memory()
    assert each.result.loads_s == [0.25]
    assert each.result.rates("alone") == [2.0]  # 4 tokens in 2 s
    assert each.result.rates("together") == [4.8]  # 12 tokens in 2.5 s
    assert each.result.resident_bytes is not None
    assert each.result.failures == {}


@pytest.mark.parametrize(
    ("told", "reason"), [("die", "it ended with 5"), ("hang", "no answer in 1 s")]
)
def test_engine_that_fails_keeps_its_figures_and_the_others_go_on(
    contest: Contest, told: str, reason: str
) -> None:
    failing, working = contest(told), contest("work")
    for each in (failing, working):
        each.start()
    for case in (ALONE, TOGETHER):
        run._run_case(case, [failing, working], repeats=2, say=say)
    run._run_case(ALONE, [failing, working], repeats=1, say=say)
    assert failing.result.rates("alone") == [2.0, 2.0]
    assert failing.result.failures["together"].startswith(reason)
    assert "ended before" in failing.result.failures["alone"]
    assert working.result.rates("together") == [4.8, 4.8]
    assert working.result.failures == {}


def test_engine_that_does_not_start_is_unavailable_and_says_why(contest: Contest) -> None:
    with pytest.raises(Unavailable, match="RuntimeError: no engine here"):
        contest("no start").start()


def test_engine_is_not_started_without_memory(
    contest: Contest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(contestant, "FREE_GB", 1 << 20)
    with pytest.raises(Unavailable, match="compare fewer at once"):
        contest("work").start()


def test_of_disturbed_runs_the_least_disturbed_counts(
    contest: Contest, monkeypatch: pytest.MonkeyPatch
) -> None:
    each = contest("work")
    each.start()
    others = iter([0.9, 0.2, 0.05, 0.5])
    monkeypatch.setattr(each, "_run", lambda case: Visit(case.name, 1.0, next(others)))
    each._patience_s = 60
    each.visit(ALONE)
    each._patience_s = 0
    each.visit(ALONE)  # without patience, what it gives counts
    assert [visit.others for visit in each.result.visits] == [0.05, 0.5]


def test_loads_are_repeated_for_what_loads_fast(contest: Contest) -> None:
    quick, slow = contest("work"), contest("work too")
    for each in (quick, slow):
        each.start()
        each.close()
    slow.result.loads_s[0] = 60.0
    run._start_again([quick, slow], 2, say)
    assert quick.result.loads_s == [0.25, 0.25, 0.25]
    assert slow.result.loads_s == [60.0]


def test_processors_are_of_different_cores_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run.os, "sched_getaffinity", lambda process: {0, 1, 2, 3})
    monkeypatch.setattr(run, "_core_of", lambda processor: f"core {processor // 2}")
    assert run.choose_processors(2) == [0, 2]
    assert run.choose_processors(3) == [0, 1, 2]
    with pytest.raises(UserError, match="may use 4 processors"):
        run.choose_processors(5)


def test_work_of_a_group_is_not_that_of_others() -> None:
    spin = "import time\nwhile time.process_time() < 0.5: pass\nprint(flush=True); time.sleep(60)"
    with Popen([sys.executable, "-c", spin], stdout=PIPE, start_new_session=True) as process:
        start = time.perf_counter()
        of_group, of_all = quiet.Others(process.pid), quiet.Others(group=-1)
        assert process.stdout is not None
        process.stdout.read(1)
        difference = of_all.processors() - of_group.processors()
        process.kill()
    assert difference * (time.perf_counter() - start) == pytest.approx(0.5, abs=0.15)
