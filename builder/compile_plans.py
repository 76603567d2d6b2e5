"""The build of an engine of plans, top to bottom: a plan for each rank, proven by an emulated
run."""

import os
from collections.abc import Callable
from pathlib import Path

import msgspec

from llmbuild.builder.artifact import EngineWriter, out_path
from llmbuild.builder.assemble import begin_manifest, make_graphs
from llmbuild.builder.open_model import open_model, state_recipe
from llmbuild.builder.paged_plans import PagedPlans
from llmbuild.builder.plan_build import PlanBuild, PlanTarget
from llmbuild.builder.prepare import prepare
from llmbuild.builder.recipe.recipe import Recipe
from llmbuild.builder.report.plan_report import make_plan_report, write_plan_report
from llmbuild.builder.rtx_plans import RtxPlans
from llmbuild.builder.shard.graphs import RankGraph
from llmbuild.builder.shard.shard import span
from llmbuild.builder.shard.split import check_parallel
from llmbuild.builder.sources.progress import PlainProgress, Progress
from llmbuild.builder.stages import Stages, peak_rss_bytes
from llmbuild.builder.tolerance import held_to_its_tolerance
from llmbuild.builder.verify_plans import verify_plans
from llmbuild.runtime.manifest import Rank
from llmbuild.runtime.target import TENSORRT, TENSORRT_RTX


def compile_plans(
    recipe: Recipe,
    base_dir: Path,
    out: str | os.PathLike[str] | None,
    dump_dir: Path | None,
    progress: Progress | None,
) -> Path:
    """Compile a recipe whose target is tensorrt or tensorrt-rtx; returns where it was published.

    Raises UserError for what the user can mend, and InternalError when the emulated network
    diverges from the reference; either way nothing is published. What the machine lacks is told
    before anything is fetched.
    """
    plans = _TARGETS[recipe.target.kind](recipe)
    stages = Stages(progress or PlainProgress())
    with EngineWriter(out_path(out, recipe.name)) as writer:
        model = open_model(recipe, base_dir, stages)
        check_parallel(recipe.parallel.of_ranks, model.config)
        resolved = recipe.resolve(model.config.max_position)
        state_recipe(resolved, writer.root, stages.progress)
        prepared = prepare(model, resolved, base_dir, writer.root, stages)
        graphs = make_graphs(
            *(model.config, resolved, prepared.step, prepared.plan, prepared.kv, prepared.read),
            *(prepared.kv_scales, writer.root, stages, dump_dir),
        )
        target = plans.record(resolved)
        manifest = begin_manifest(model.config, resolved, prepared.plan, prepared.kv, target)
        for kind, count in manifest.quantised_kinds.items():
            stages.progress.note(f"quantised: {count} tensors to {kind}")
        build = PlanBuild(resolved, manifest, graphs, writer.root, base_dir)
        plans.check(build)
        tolerance = resolved.verify.tolerance
        with held_to_its_tolerance(resolved):
            emulated = verify_plans(
                *(writer.root, prepared, plans.script(manifest)),
                *(lambda steps: plans.emulate(build, steps), tolerance, stages),
            )
        if resolved.parallel.pp > 1:
            stages.progress.note("engines of several stages are built, and can't be served yet")
        ranks = [_build_rank(plans, build, graph, stages) for graph in graphs]
        manifest = msgspec.structs.replace(manifest, ranks=ranks)
        report = make_plan_report(
            manifest, graphs, emulated, tolerance, stages.seconds, writer.root
        )
        write_plan_report(report, writer.root)
        with stages.stage("publish"):
            writer.publish(manifest)
    stages.progress.note(f"peak memory {peak_rss_bytes() / 1e6:.0f} MB")
    return writer.out


_TARGETS: dict[str, Callable[[Recipe], PlanTarget]] = {
    TENSORRT: PagedPlans,
    TENSORRT_RTX: lambda recipe: RtxPlans(),
}


def _build_rank(plans: PlanTarget, build: PlanBuild, graph: RankGraph, stages: Stages) -> Rank:
    """Write a rank's plan."""
    shard, variants = graph.shard, build.manifest.target.variants
    path = f"rank{shard.rank}/engine.plan"
    what = f"rank {shard.rank}: " if len(build.graphs) > 1 else ""
    with stages.stage(f"{what}build plan"):
        built = plans.build(build, graph)
        (build.root / path).parent.mkdir()
        (build.root / path).write_bytes(built.content)
    return Rank(
        stage=shard.stage,
        tp_rank=shard.tp_rank,
        layers=span(shard.layers),
        heads=span(shard.heads),
        kv_heads=span(shard.kv_heads),
        tokens=span(shard.tokens),
        executables=dict.fromkeys(variants, path),
        weights=path,
        shared_weights=None,
        arena_bytes=0,
        plan_tensors=built.tensors,
    )
