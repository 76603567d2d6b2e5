"""The build of an engine of TensorRT for RTX, top to bottom: a plan for each rank, proven by an
emulated run, as no GPU is needed here."""

import os
from collections.abc import Sequence
from math import gcd
from pathlib import Path

import msgspec

from llmbuild.builder.artifact import EngineWriter, out_path
from llmbuild.builder.assemble import begin_manifest, make_graphs
from llmbuild.builder.open_model import open_model, state_recipe
from llmbuild.builder.prepare import prepare
from llmbuild.builder.recipe.recipe import Recipe, ResolvedRecipe
from llmbuild.builder.report.plan_report import make_plan_report, write_plan_report
from llmbuild.builder.shard.graphs import RankGraph
from llmbuild.builder.shard.shard import span
from llmbuild.builder.shard.split import check_parallel
from llmbuild.builder.sources.progress import PlainProgress, Progress
from llmbuild.builder.stages import Stages, peak_rss_bytes
from llmbuild.builder.targets.tensorrt.build import build_plan, installed_tensorrt_rtx
from llmbuild.builder.targets.tensorrt.limits import ActivationDtype, Limits
from llmbuild.builder.verify_plans import verify_plans
from llmbuild.errors import RecipeError
from llmbuild.runtime.manifest import Rank
from llmbuild.runtime.target import ALIGNMENT_BYTES, RtxTarget

_ACTIVATION_BYTES = 2  # fp16 or bf16


def compile_plans(
    recipe: Recipe,
    base_dir: Path,
    out: str | os.PathLike[str] | None,
    dump_dir: Path | None,
    progress: Progress | None,
) -> Path:
    """Compile a recipe whose target is tensorrt-rtx; returns where it was published.

    Raises UserError for what the user can mend, and InternalError when the emulated network
    diverges from the reference; either way nothing is published.
    """
    version = installed_tensorrt_rtx().__version__
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
        assert resolved.target.capabilities is not None
        target = RtxTarget(version=version, capabilities=list(resolved.target.capabilities))
        manifest = begin_manifest(model.config, resolved, prepared.plan, prepared.kv, target)
        for kind, count in manifest.quantised_kinds.items():
            stages.progress.note(f"quantised: {count} tensors to {kind}")
        limits = plan_limits(resolved)
        _check_slots(graphs, limits)
        emulated = verify_plans(
            *(writer.root, manifest, prepared, graphs, activations_of(resolved)),
            *(resolved.verify.tolerance, limits, stages),
        )
        if len(graphs) > 1:
            stages.progress.note("engines of several ranks are built, and can't be served yet")
        ranks = [_build_rank(graph, resolved, limits, writer.root, stages) for graph in graphs]
        manifest = msgspec.structs.replace(manifest, ranks=ranks)
        tolerance = resolved.verify.tolerance
        report = make_plan_report(
            manifest, graphs, emulated, tolerance, stages.seconds, writer.root
        )
        write_plan_report(report, writer.root)
        with stages.stage("publish"):
            writer.publish(manifest)
    stages.progress.note(f"peak memory {peak_rss_bytes() / 1e6:.0f} MB")
    return writer.out


def plan_limits(resolved: ResolvedRecipe) -> Limits:
    """What the plans of a recipe are built for."""
    limits = resolved.limits
    return Limits(
        batch=limits.max_sequences,
        chunk=min(limits.max_step_tokens, limits.max_sequence_length),
        capacity=limits.max_sequence_length,
    )


def _check_slots(graphs: Sequence[RankGraph], limits: Limits) -> None:
    """Raises RecipeError where slots of a cache wouldn't begin where a plan may be bound, and for
    heads that TensorRT's attention doesn't take."""
    for graph in graphs:
        if graph.config.head_dim % 8:
            raise RecipeError(
                f"target: tensorrt-rtx takes heads of a multiple of 8 elements, and this model's "
                f"have {graph.config.head_dim}; choose target cpu"
            )
        position_bytes = graph.config.num_kv_heads * graph.config.head_dim * _ACTIVATION_BYTES
        step = ALIGNMENT_BYTES // gcd(ALIGNMENT_BYTES, position_bytes)
        if limits.capacity % step:
            raise RecipeError(
                f"limits.max_sequence_length: {limits.capacity} was chosen; on tensorrt-rtx it has "
                f"to be a multiple of {step} for this model, so that each sequence's keys begin at "
                f"a multiple of {ALIGNMENT_BYTES} bytes"
            )


def activations_of(resolved: ResolvedRecipe) -> ActivationDtype:
    """The dtype of a network's activations."""
    assert resolved.precision != "fp32", "the recipe would be refused"
    return resolved.precision


def _build_rank(
    graph: RankGraph, resolved: ResolvedRecipe, limits: Limits, root: Path, stages: Stages
) -> Rank:
    """Write a rank's plan below `root`."""
    shard, capabilities = graph.shard, resolved.target.capabilities
    assert capabilities is not None
    path = f"rank{shard.rank}/engine.plan"
    what = f"rank {shard.rank}: " if shard.parallel.tp * shard.parallel.pp > 1 else ""
    with stages.stage(f"{what}build plan"):
        built = build_plan(
            *(graph.step, graph.config, limits, activations_of(resolved), graph.read),
            capabilities,
        )
        (root / path).parent.mkdir()
        (root / path).write_bytes(built.content)
    return Rank(
        stage=shard.stage,
        tp_rank=shard.tp_rank,
        layers=span(shard.layers),
        heads=span(shard.heads),
        kv_heads=span(shard.kv_heads),
        tokens=span(shard.tokens),
        executables=dict.fromkeys(capabilities, path),
        weights=path,
        shared_weights=None,
        arena_bytes=0,
        plan_tensors=built.tensors,
    )
