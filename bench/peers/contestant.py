"""One variant in a comparison: its driver, and what that gave."""

import json
import statistics
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

from bench.peers.convert import weights_bytes
from bench.peers.drivers.line_protocol import Setup
from bench.peers.protocol import Driver, DriverError
from bench.peers.quiet import QUIET, Others, wait_until_quiet
from bench.peers.variants import OURS, Variant
from bench.peers.work_folder import Unavailable, WorkFolder
from bench.peers.workload import Case

START_LIMIT_S, RUN_LIMIT_S = 600, 600
FREE_GB = 4  # of memory; must be left before a driver starts


@dataclass(frozen=True)
class Visit:
    """A run of a case, the median of its repeats. others: processors that other processes used."""

    case: str
    tokens_per_s: float
    others: float


@dataclass
class Result:
    """What a variant gave. failures: why, by the case. Memory is that at the largest load."""

    variant: Variant
    weights_bytes: int
    versions: str = ""
    loads_s: list[float] = field(default_factory=list)
    visits: list[Visit] = field(default_factory=list)
    resident_bytes: int | None = None
    peak_bytes: int | None = None
    failures: dict[str, str] = field(default_factory=dict)

    def rates(self, case: str) -> list[float]:
        return [visit.tokens_per_s for visit in self.visits if visit.case == case]


class Contestant:
    """A variant whose driver starts, is asked for cases, and may fail at any of that."""

    def __init__(
        self,
        variant: Variant,
        model: Path,
        setup: Setup,
        work: WorkFolder,
        patience_s: float,
    ) -> None:
        """patience_s: for how long a run is put off, or repeated, while other processes work."""
        self.result = Result(variant, weights_bytes(model))
        limits = json.dumps(asdict(setup))
        self._command = [*driver_command(variant.peer, work), str(model), limits]
        self._patience_s = patience_s
        self._log = work.log(f"run-{variant.name.replace(' ', '-')}")
        self._driver: Driver | None = None

    @property
    def name(self) -> str:
        return self.result.variant.name

    def start(self) -> None:
        """Notes the time to the first token; Unavailable if there is none."""
        free = _available_bytes()
        if free < FREE_GB << 30:
            raise Unavailable(
                f"{free / 2**30:.1f} GB of memory are free beside the engines before it, and "
                f"{FREE_GB} are asked for; compare fewer at once"
            )
        wait_until_quiet(self._patience_s)
        try:
            self._driver = Driver(self._command, self._log, START_LIMIT_S)
        except DriverError as error:
            raise Unavailable(str(error)) from error
        self.result.versions = str(self._driver.ready["versions"])
        self.result.loads_s.append(self._driver.load_s)

    def visit(self, case: Case) -> Visit | None:
        """Of the runs that others disturb, the one that they disturb least counts."""
        end = time.perf_counter() + self._patience_s
        visits: list[Visit] = []
        while case.name not in self.result.failures:
            wait_until_quiet(end - time.perf_counter())
            try:
                visits.append(self._run(case))
            except DriverError as error:
                self._fail(case, error)
            else:
                if visits[-1].others <= QUIET or time.perf_counter() > end:
                    break
        if not visits:
            return None
        best = min(visits, key=lambda visit: visit.others)
        self.result.visits.append(best)
        return best

    def note_memory(self) -> None:
        """Of the process that served last."""
        self.result.resident_bytes = self.result.peak_bytes = None
        if self._driver is None:
            return
        try:
            memory = self._driver.ask({"do": "memory"}, RUN_LIMIT_S)
        except DriverError as error:
            self.result.failures["memory"] = str(error)
            return
        self.result.resident_bytes = int(memory["resident_bytes"])
        self.result.peak_bytes = int(memory["peak_bytes"])

    def close(self) -> None:
        if self._driver is not None:
            self._driver.close()
            self._driver = None

    def _run(self, case: Case) -> Visit:
        if self._driver is None:
            raise DriverError("it had ended before", is_over=True)
        others = Others(self._driver.group)
        reply = self._driver.ask(
            {
                "do": "run",
                "prompts": case.prompts,
                "new_tokens": case.new_tokens,
                "repeats": case.repeats,
            },
            RUN_LIMIT_S,
        )
        times = zip(reply["first_s"], reply["total_s"], strict=True)
        rate = statistics.median(case.tokens_per_s(first, total) for first, total in times)
        return Visit(case.name, rate, others.processors())

    def _fail(self, case: Case, error: DriverError) -> None:
        self.result.failures[case.name] = str(error)
        if error.is_over:
            self.close()


def driver_command(peer: str, work: WorkFolder) -> list[str]:
    """To which the model and the setup are added."""
    python = sys.executable if peer == OURS else str(work.python(peer))
    return [python, "-m", f"bench.peers.drivers.{peer}"]


def _available_bytes() -> int:
    lines = Path("/proc/meminfo").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable"))
