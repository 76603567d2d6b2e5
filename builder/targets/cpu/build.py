"""The cpu target: from the step graphs of all ranks to executables and weights files."""

import platform
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from llmbuild.builder.graph.materialise import weight_parts
from llmbuild.builder.graph.step_graph import CODES
from llmbuild.builder.shard.graphs import RankGraph
from llmbuild.builder.shard.shard import Shard, span
from llmbuild.builder.stages import Stages
from llmbuild.builder.targets.cpu import toolchain
from llmbuild.builder.targets.cpu.emit import emit
from llmbuild.builder.targets.cpu.lower import lower
from llmbuild.builder.targets.cpu.memory import ArenaPlan, plan_arena
from llmbuild.builder.targets.cpu.pack import packed_bytes, write_weights
from llmbuild.builder.targets.cpu.plan import PackedWeight, StepPlan
from llmbuild.quant.reader import Tensor
from llmbuild.runtime.manifest import Limits, Rank
from llmbuild.runtime.target import CpuTarget

WEIGHTS = "weights.safetensors"
_BLOCK_BYTES = 8 << 20  # of a weight, read and packed at a time


def cpu_target(levels: Sequence[str]) -> CpuTarget:
    """The target of a build on this machine; levels: best first."""
    return CpuTarget(
        machine=platform.machine(),
        isa_levels=list(levels),
        compiler=toolchain.find_compiler().name,
        compiler_flags={level: toolchain.flags(level) for level in levels},
    )


@dataclass(frozen=True)
class CpuBuild:
    """What the manifest says of each rank, and its plan."""

    ranks: list[Rank]
    plans: list[StepPlan]


def build_cpu(
    graphs: Sequence[RankGraph],
    *,
    name: str,
    limits: Limits,
    levels: Sequence[str],
    root: Path,
    stages: Stages,
    only_rank: int | None = None,
) -> CpuBuild:
    """Write, below `root`, the executables of each ISA level and the packed weights, of one rank
    after the other; and once for each stage, with its first rank's, the weights that its ranks have
    in common.

    levels: best first. only_rank: whose files to write, by default all.
    """
    with stages.stage("lower"):
        plans = _with_shared([lower(each.step, each.config, each.kv) for each in graphs], graphs)
    ranks = []
    for graph, plan in zip(graphs, plans, strict=True):
        arena = plan_arena(plan, limits)
        rank = _record(graph.shard, plan, levels, arena)
        if only_rank in (None, graph.shard.rank):
            what = f"rank {graph.shard.rank}: " if len(graphs) > 1 else ""
            source = emit(plan, arena, limits, name)
            _write_files(graph, plan, rank, source, root, stages, what)
        ranks.append(rank)
    return CpuBuild(ranks, plans)


def _record(shard: Shard, plan: StepPlan, levels: Sequence[str], arena: ArenaPlan) -> Rank:
    folder = f"rank{shard.rank}"
    return Rank(
        stage=shard.stage,
        tp_rank=shard.tp_rank,
        layers=span(shard.layers),
        heads=span(shard.heads),
        kv_heads=span(shard.kv_heads),
        tokens=span(shard.tokens),
        executables={level: f"{folder}/engine.{level}.so" for level in levels},
        weights=f"{folder}/{WEIGHTS}",
        shared_weights=f"stage{shard.stage}/{WEIGHTS}" if plan.shared else None,
        arena_bytes=arena.size_bytes,
    )


def _write_files(
    graph: RankGraph,
    plan: StepPlan,
    rank: Rank,
    source: str,
    root: Path,
    stages: Stages,
    what: str,
) -> None:
    """what: begins the names of the stages."""
    (root / rank.weights).parent.mkdir()
    for level, path in rank.executables.items():
        with stages.stage(f"{what}compile {level}"):
            record = toolchain.compile(source, level, root / path)
            if record.cached:
                stages.progress.note(f"{level}: same code as before, taken from the cache")
    own = [weight for weight in plan.weights if weight.name not in plan.shared]
    _write(graph, own, root / rank.weights, stages, f"{what}pack weights")
    if rank.shared_weights is not None and rank.tp_rank == 0:
        (root / rank.shared_weights).parent.mkdir()
        common = [weight for weight in plan.weights if weight.name in plan.shared]
        what = f"stage {rank.stage}: pack common weights"
        _write(graph, common, root / rank.shared_weights, stages, what)


def _with_shared(plans: Sequence[StepPlan], graphs: Sequence[RankGraph]) -> list[StepPlan]:
    """The plans, each told which of its weights every rank of its stage has."""
    tp = graphs[0].shard.parallel.tp
    if tp == 1:
        return list(plans)
    contents = [
        {_content(weight, graph): weight.name for weight in plan.weights}
        for plan, graph in zip(plans, graphs, strict=True)
    ]
    together = []
    for index, plan in enumerate(plans):
        first = index - index % tp
        common = set.intersection(*(set(each) for each in contents[first : first + tp]))
        shared = frozenset(name for content, name in contents[index].items() if content in common)
        together.append(replace(plan, shared=shared))
    return together


def _content(weight: PackedWeight, graph: RankGraph) -> tuple[object, ...]:
    """What two ranks' weights have to agree in to be the same bytes."""
    constant = graph.step.constants.get(weight.name)
    if constant is not None:
        return (weight, constant.tobytes())
    recorded = graph.step.weights.get(weight.name) or graph.step.weights[f"{weight.name}.{CODES}"]
    return (weight, *(graph.ranges.get(source) for source in recorded.sources))


def _write(
    graph: RankGraph, weights: Sequence[PackedWeight], path: Path, stages: Stages, what: str
) -> None:
    with (
        stages.stage(what, shows_bars=True),
        stages.progress.task("packing", sum(map(packed_bytes, weights))) as advance,
    ):
        write_weights(weights, partial(_values, graph), path, advance)


def _values(graph: RankGraph, weight: PackedWeight) -> Iterable[Tensor]:
    """In blocks of rows."""
    if weight.name in graph.step.constants:
        return [graph.step.constants[weight.name]]
    name = weight.name if weight.grid is None else f"{weight.name}.{CODES}"
    return weight_parts(graph.step.weights[name], graph.read, _BLOCK_BYTES)
