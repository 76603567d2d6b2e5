"""The build, top to bottom: a recipe in, an engine directory out."""

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from llmbuild.builder.artifact import EngineWriter, out_path, seal_engine
from llmbuild.builder.assemble import Assembled, Model, assemble
from llmbuild.builder.compile_plans import compile_plans
from llmbuild.builder.gate import GateResult, check_texts, reference_recipe, run_gate
from llmbuild.builder.open_model import check_calibration_data, open_model, state_recipe
from llmbuild.builder.prepare import prepare
from llmbuild.builder.rank_set import RankSet, check_rank
from llmbuild.builder.recipe.recipe import (
    Recipe,
    ResolvedRecipe,
    effective_yaml,
    load_recipe,
)
from llmbuild.builder.recipe.target import NATIVE
from llmbuild.builder.report.compiled_precision import require_planned
from llmbuild.builder.report.page import write_report
from llmbuild.builder.report.report import make_report
from llmbuild.builder.report.rounding_losses import rounding_losses
from llmbuild.builder.shard.split import check_parallel
from llmbuild.builder.sources.progress import PlainProgress, Progress
from llmbuild.builder.stages import Stages, peak_rss_bytes
from llmbuild.builder.targets.cpu import toolchain
from llmbuild.builder.targets.cpu.read_precision import read_precision
from llmbuild.builder.tolerance import held_to_its_tolerance
from llmbuild.builder.verify import verify_engine
from llmbuild.errors import RecipeError
from llmbuild.runtime.target import CPU


def compile(
    recipe_path: str | os.PathLike[str],
    out: str | os.PathLike[str] | None = None,
    overrides: Sequence[str] = (),
    *,
    dump_dir: Path | None = None,
    progress: Progress | None = None,
) -> Path:
    """Compile a recipe to an engine directory; returns its path.

    out: where to publish, engines/<name> by default; an engine there is replaced in one step.
    overrides: "key.path=value", applied to the recipe. dump_dir: where to write the step graph
    after each pass. Raises UserError for what the user can mend, a failed gate among it,
    InternalError when the compiled code diverges from the reference or from the planned precisions;
    either way nothing is published.
    """
    published = _compile(recipe_path, out, overrides, None, dump_dir, progress)
    assert published is not None
    return published


def compile_rank(
    rank: int,
    recipe_path: str | os.PathLike[str],
    out: str | os.PathLike[str] | None = None,
    overrides: Sequence[str] = (),
    *,
    progress: Progress | None = None,
) -> Path | None:
    """Compile one rank of a recipe's engine; to be called for each, in any order, also at once.

    The ranks wait beside the output path until the last is there: its call verifies them together
    and publishes the engine, whose path it returns. The others return None. Raises as compile does,
    and RecipeError for a rank that there isn't.
    """
    return _compile(recipe_path, out, overrides, rank, None, progress)


def _compile(
    recipe_path: str | os.PathLike[str],
    out: str | os.PathLike[str] | None,
    overrides: Sequence[str],
    rank: int | None,
    dump_dir: Path | None,
    progress: Progress | None,
) -> Path | None:
    recipe_path = Path(recipe_path)
    base_dir = recipe_path.parent
    recipe = load_recipe(recipe_path, overrides)
    check_calibration_data(recipe, base_dir)
    if recipe.target.kind != CPU:
        if rank is not None:
            raise RecipeError(
                f"--rank {rank}: leave it out, {recipe.target.kind} builds the plans of all ranks "
                "in one call"
            )
        return compile_plans(recipe, base_dir, out, dump_dir, progress)
    if rank is not None:
        check_rank(rank, recipe.parallel.of_ranks)
    levels = toolchain.resolve_levels(recipe.target.isa or (NATIVE,))
    toolchain.find_compiler()
    reference = None
    if recipe.gate is not None:
        check_texts(recipe.gate, base_dir, recipe.name)
        reference = reference_recipe(recipe)
    stages = Stages(progress or PlainProgress())

    with EngineWriter(out_path(out, recipe.name)) as writer:
        root = writer.root
        model = open_model(recipe, base_dir, stages)
        check_parallel(recipe.parallel.of_ranks, model.config)
        resolved = recipe.resolve(model.config.max_position)
        state_recipe(resolved, root, stages.progress)
        others = None if rank is None else _rank_set(writer.out, resolved)
        assembled = build_engine(model, resolved, base_dir, root, levels, stages, dump_dir, rank)
        if rank is not None and others is not None:
            missing = others.add(rank, root)
            if missing:
                stages.progress.note(f"rank {rank} waits for ranks {', '.join(map(str, missing))}")
                return None
        manifest = assembled.manifest
        for kind, count in manifest.quantised_kinds.items():
            stages.progress.note(f"quantised: {count} tensors to {kind}")
        tolerance = resolved.verify.tolerance
        with held_to_its_tolerance(resolved):
            verified = verify_engine(
                root, manifest, assembled.step, assembled.read, tolerance, stages
            )
        gate = None
        if reference is not None:
            gate = _hold_to_gate(model, resolved, reference, assembled, writer, base_dir, stages)
        with stages.stage("measure rounding"):
            losses = rounding_losses(model.weights, assembled.quant_plan, assembled.read)
        report = make_report(
            assembled,
            model.config,
            verified,
            gate,
            tolerance,
            stages.seconds,
            rounding_losses=losses,
            calibration=resolved.calibration,
        )
        write_report(report, root)
        with stages.stage("publish"):
            writer.publish(manifest)
    stages.progress.note(f"peak memory {peak_rss_bytes() / 1e6:.0f} MB")
    return writer.out


def _rank_set(out: Path, resolved: ResolvedRecipe) -> RankSet:
    return RankSet(out, effective_yaml(resolved), resolved.parallel.of_ranks)


def build_engine(
    model: Model,
    resolved: ResolvedRecipe,
    base_dir: Path,
    root: Path,
    levels: Sequence[str],
    stages: Stages,
    dump_dir: Path | None = None,
    rank: int | None = None,
) -> Assembled:
    """Plan, calibrate where the plan asks for it, and write an engine's files below `root`; with
    `rank` those of this rank alone."""
    prepared = prepare(model, resolved, base_dir, root, stages)
    assembled = assemble(
        model,
        resolved,
        prepared.step,
        prepared.plan,
        prepared.kv,
        prepared.read,
        kv_scales=prepared.kv_scales,
        levels=levels,
        root=root,
        stages=stages,
        dump_dir=dump_dir,
        only_rank=rank,
    )
    for graph, rank_plan in zip(assembled.graphs, assembled.rank_plans, strict=True):
        compiled = read_precision(rank_plan, graph.step)
        require_planned(compiled, assembled.manifest, graph.step, graph.kv)
    if prepared.calibrated is None:
        return assembled
    calibrated = prepared.calibrated
    return replace(assembled, product_losses=calibrated.losses, distilled=calibrated.distilled)


def _hold_to_gate(
    model: Model,
    resolved: ResolvedRecipe,
    reference: Recipe,
    assembled: Assembled,
    writer: EngineWriter,
    base_dir: Path,
    stages: Stages,
) -> GateResult:
    """Compile the unquantised engine beside ours, and measure both."""
    assert resolved.gate is not None
    stages.progress.note("gate: compiling the unquantised engine to compare with")
    writer.reference.mkdir()
    levels = toolchain.resolve_levels((NATIVE,))
    model = model.as_stored
    unquantised = reference.resolve(model.config.max_position)
    aside = Stages(stages.progress)  # whose times aren't the engine's
    built = build_engine(model, unquantised, base_dir, writer.reference, levels, aside)
    seal_engine(writer.reference, built.manifest)
    seal_engine(writer.root, assembled.manifest)
    return run_gate(resolved.gate, base_dir, writer.root, writer.reference, stages)
