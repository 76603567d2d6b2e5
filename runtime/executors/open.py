"""Opens what runs an engine's steps, whether it has one rank or several."""

import math
import os
from typing import TYPE_CHECKING

from llmbuild.errors import UserError
from llmbuild.runtime.executors import Executor
from llmbuild.runtime.target import CpuTarget
from llmbuild.runtime.threads import choose_num_threads, choose_pinning

if TYPE_CHECKING:  # what opens an executor is imported when it is known which one
    from llmbuild.runtime.engine import Engine

RANK_TIMEOUT_S = 60.0
MAX_RANK_TIMEOUT_S = 2_000_000.0  # of what is counted in ms by an int32


def open_executor(
    engine: "Engine",
    num_blocks: int,
    num_threads: int | None = None,
    pin_threads: bool | None = None,
    *,
    rank_timeout_s: float = RANK_TIMEOUT_S,
) -> Executor:
    """The executor of an engine whose files are verified.

    num_blocks: of every layer's pools, the scratch block included. num_threads: of each rank, by
    default the processors that it may use; pin_threads: whether each keeps to one of them. On a
    GPU neither may be given.
    rank_timeout_s: how long a rank may keep the others waiting before it is given up.

    Raises EngineError when a rank can't be opened, and UserError for a bad option. In a process
    that a launcher has started for a rank other than 0 it serves rank 0 until that closes, and
    then raises SystemExit.
    """
    check_rank_timeout(rank_timeout_s)
    if not isinstance(engine.manifest.target, CpuTarget):
        if num_threads is not None or pin_threads:
            raise UserError(
                "num_threads and pin_threads are for engines of cpu, and this one runs on a GPU; "
                "leave them out"
            )
        return _open_plans(engine, num_blocks, rank_timeout_s)

    if len(engine.manifest.ranks) == 1:
        from llmbuild.runtime.executors.cpu import CpuExecutor

        num_threads = choose_num_threads(num_threads)
        pins = choose_pinning(pin_threads, num_threads)
        return CpuExecutor(engine, num_blocks, num_threads, pins)

    from llmbuild.runtime.parallel.environment import read_launch

    launch = read_launch(os.environ, len(engine.manifest.ranks))
    options = (num_blocks, num_threads, pin_threads, rank_timeout_s)
    if launch is None:
        from llmbuild.runtime.parallel.local import open_local_ranks

        return open_local_ranks(engine, *options)

    from llmbuild.runtime.parallel.hosts import open_launched_rank

    return open_launched_rank(engine, launch, *options)


def _open_plans(engine: "Engine", num_blocks: int, rank_timeout_s: float) -> Executor:
    from llmbuild.runtime.executors.open_plan import open_plan

    num_ranks = len(engine.manifest.ranks)
    if num_ranks == 1:
        return open_plan(engine, num_blocks)

    from llmbuild.runtime.parallel.environment import read_launch

    if read_launch(os.environ, num_ranks) is not None:
        raise UserError(
            f"the engine's {num_ranks} ranks on GPUs are started by one process; start that alone, "
            "without a launcher"
        )

    from llmbuild.runtime.parallel.plan_ranks import open_plan_ranks

    return open_plan_ranks(engine, num_blocks, rank_timeout_s)


def check_rank_timeout(rank_timeout_s: float) -> None:
    """Raises UserError unless it is a time that ranks can wait."""
    is_number = isinstance(rank_timeout_s, int | float) and not isinstance(rank_timeout_s, bool)
    if not is_number or not 0 < rank_timeout_s <= MAX_RANK_TIMEOUT_S or math.isnan(rank_timeout_s):
        raise UserError(
            f"rank_timeout_s is {rank_timeout_s!r}; it must be a number of seconds above 0 and at "
            f"most {MAX_RANK_TIMEOUT_S:.0f}"
        )
