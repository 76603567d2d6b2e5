"""The cpu target: from a step graph to executables and a weights file, for one rank."""

import platform
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from llmbuild.builder.graph.materialise import ReadTensor, materialise, materialise_matrix
from llmbuild.builder.graph.step_graph import CODES, StepGraph
from llmbuild.builder.models.config import DecoderConfig
from llmbuild.builder.stages import Stages
from llmbuild.builder.targets.cpu import toolchain
from llmbuild.builder.targets.cpu.emit import emit
from llmbuild.builder.targets.cpu.lower import lower
from llmbuild.builder.targets.cpu.memory import plan_arena
from llmbuild.builder.targets.cpu.pack import packed_bytes, write_weights
from llmbuild.builder.targets.cpu.plan import PackedWeight, StepPlan
from llmbuild.quant.grid import QuantisedMatrix
from llmbuild.runtime.manifest import KVLayout, Limits, Rank, Target

TARGET_KIND = "cpu"
RANK_FOLDER = "rank0"


@dataclass(frozen=True)
class CpuBuild:
    """What the manifest says of a build, and the plan that the report counts bytes of."""

    target: Target
    rank: Rank
    plan: StepPlan


def build_cpu(
    step: StepGraph,
    config: DecoderConfig,
    read: ReadTensor,
    *,
    name: str,
    limits: Limits,
    kv: KVLayout,
    levels: Sequence[str],
    root: Path,
    stages: Stages,
) -> CpuBuild:
    """Write one executable for each ISA level and the packed weights below `root`.

    read: gives a canonical tensor; each is read once. levels: best first.
    """
    folder = root / RANK_FOLDER
    folder.mkdir()
    with stages.stage("lower and emit"):
        plan = lower(step, config, kv)
        arena = plan_arena(plan, limits)
        source = emit(plan, arena, limits, name)
    executables = {level: f"{RANK_FOLDER}/engine.{level}.so" for level in levels}
    for level, path in executables.items():
        with stages.stage(f"compile {level}"):
            record = toolchain.compile(source, level, root / path)
            if record.cached:
                stages.progress.note(f"{level}: same code as before, taken from the cache")
    weights = f"{RANK_FOLDER}/weights.safetensors"
    with (
        stages.stage("pack weights", shows_bars=True),
        stages.progress.task("packing", sum(map(packed_bytes, plan.weights))) as advance,
    ):
        write_weights(plan, partial(_values, step, read), root / weights, advance)
    return CpuBuild(
        target=Target(
            kind=TARGET_KIND,
            machine=platform.machine(),
            isa_levels=list(levels),
            compiler=toolchain.find_compiler().name,
            compiler_flags={level: toolchain.flags(level) for level in levels},
        ),
        rank=Rank(executables=executables, weights=weights, arena_bytes=arena.size_bytes),
        plan=plan,
    )


def _values(
    step: StepGraph, read: ReadTensor, weight: PackedWeight
) -> NDArray[np.generic] | QuantisedMatrix:
    if weight.grid is None:
        return materialise(step, weight.name, read)
    return materialise_matrix(step.weights[f"{weight.name}.{CODES}"], read)
