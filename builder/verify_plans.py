"""The build's check of plans, which nothing here can run: the networks that they are built of, run
on the CPU, against the torch reference."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from llmbuild.builder.plan_build import Script
from llmbuild.builder.prepare import Prepared
from llmbuild.builder.stages import Stages
from llmbuild.builder.tolerance import require_within
from llmbuild.builder.verify import run_reference, stored_steps
from llmbuild.runtime.replay import (
    STEPS_FILE,
    VerificationSteps,
    relative_difference,
    save_steps,
)


def verify_plans(
    root: Path,
    prepared: Prepared,
    script: Script,
    emulate: Callable[[VerificationSteps], list[NDArray[np.float32]]],
    tolerance: float,
    stages: Stages,
) -> float:
    """The largest relative difference of the logits of the ranks' emulated networks. Leaves the
    steps below `root`, for `llmbuild verify` where there is a GPU.

    Raises Divergence when it is larger than `tolerance`.
    """
    expected = run_reference(
        *(prepared.step, prepared.read, script.batches, script.kv, script.num_blocks), stages
    )
    steps = stored_steps(script.plan_batches, expected, script.plan_blocks, tolerance)
    save_steps(steps, root / STEPS_FILE)
    with stages.stage("emulate"):
        got = emulate(steps)
    worst = max(map(relative_difference, got, expected))
    stages.progress.note(f"emulated network: logits differ by {worst:.1e} of the largest")
    require_within(tolerance, worst, "emulated network")
    return worst
