"""From a model and a resolved recipe to an engine's files and manifest, in a folder."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import msgspec

from llmbuild.builder.calibration.store import Distilled
from llmbuild.builder.checkpoint.tokenizer import write_tokenizer
from llmbuild.builder.graph.pipeline import run_passes
from llmbuild.builder.graph.step_graph import StepGraph
from llmbuild.builder.models.config import DecoderConfig
from llmbuild.builder.models.rotated import ModelTensors
from llmbuild.builder.recipe.recipe import ResolvedRecipe
from llmbuild.builder.shard.graphs import RankGraph, rank_graphs
from llmbuild.builder.shard.localise import Scales
from llmbuild.builder.stages import Stages
from llmbuild.builder.targets.cpu.build import build_cpu, cpu_target
from llmbuild.builder.targets.cpu.lower import lower
from llmbuild.builder.targets.cpu.plan import StepPlan
from llmbuild.quant.plan import QuantPlan
from llmbuild.quant.reader import PlannedReader
from llmbuild.runtime.manifest import (
    ALONE,
    SCHEMA_VERSION,
    KVLayout,
    Limits,
    Manifest,
    QuantisedTensor,
)
from llmbuild.runtime.target import Target
from llmbuild.version import __version__


@dataclass(frozen=True)
class Model:
    """A model that is open: where it lies, what it is, and its weights. unrotated: as the
    checkpoint has it, where this is the same model in rotated coordinates."""

    path: Path
    config: DecoderConfig
    weights: ModelTensors
    unrotated: "Model | None" = None

    @property
    def as_stored(self) -> "Model":
        """As the checkpoint has it."""
        return self.unrotated or self


@dataclass(frozen=True)
class Assembled:
    """An engine whose files are written; its manifest isn't. step, plan: of the whole model, though
    it be compiled rank by rank. graphs, rank_plans: of each rank. product_losses: of the matrices
    that calibration rounded, the relative squared error of their products with its inputs.
    distilled: what training them together reached, None where it didn't run."""

    manifest: Manifest
    step: StepGraph
    quant_plan: QuantPlan
    plan: StepPlan
    read: PlannedReader
    graphs: Sequence[RankGraph]
    rank_plans: Sequence[StepPlan]
    product_losses: Mapping[str, float] = field(default_factory=dict)
    distilled: Distilled | None = None


def assemble(
    model: Model,
    resolved: ResolvedRecipe,
    step: StepGraph,
    quant_plan: QuantPlan,
    kv: KVLayout,
    read: PlannedReader,
    *,
    kv_scales: Scales,
    levels: Sequence[str],
    root: Path,
    stages: Stages,
    dump_dir: Path | None = None,
    only_rank: int | None = None,
) -> Assembled:
    """Write the engine below `root`: graphs, executables, weights and tokenizer.

    step: as traced; the passes change it. read: gives tensors as the plan has them. levels: ISA
    levels, best first. kv_scales: the KV cache's channel scales. dump_dir: where to write the step
    graph after each pass. only_rank: whose files to write, by default all.
    Raises RecipeError where the model can't be divided as the recipe wants.
    """
    write_tokenizer(model.path, root)
    graphs = make_graphs(
        *(model.config, resolved, step, quant_plan, kv, read, kv_scales), root, stages, dump_dir
    )
    manifest = begin_manifest(model.config, resolved, quant_plan, kv, cpu_target(levels))
    built = build_cpu(
        graphs,
        name=resolved.name,
        limits=manifest.limits,
        levels=levels,
        root=root,
        stages=stages,
        only_rank=only_rank,
    )
    is_alone = manifest.parallel == ALONE
    return Assembled(
        manifest=msgspec.structs.replace(manifest, ranks=built.ranks),
        step=step,
        quant_plan=quant_plan,
        plan=built.plans[0] if is_alone else lower(step, model.config, kv),
        read=read,
        graphs=graphs,
        rank_plans=built.plans,
    )


def make_graphs(
    config: DecoderConfig,
    resolved: ResolvedRecipe,
    step: StepGraph,
    quant_plan: QuantPlan,
    kv: KVLayout,
    read: PlannedReader,
    kv_scales: Scales,
    root: Path,
    stages: Stages,
    dump_dir: Path | None = None,
) -> list[RankGraph]:
    """Run the passes on the step graph, and divide the model; the graphs are left below `root`.
    Raises RecipeError where it can't be divided as the recipe wants."""
    with stages.stage("passes"):
        run_passes(step, dump_dir, quant_plan, kv_scales)
        step.save(root / "graph" / "step.onnx")
    parallel = resolved.parallel.of_ranks
    if parallel == ALONE:
        return [RankGraph(step, config, kv, read)]
    with stages.stage("divide"):
        graphs = rank_graphs(
            parallel, config, traced_precision(resolved), quant_plan, kv, kv_scales, read
        )
        for graph in graphs:
            graph.step.save(root / "graph" / f"rank{graph.shard.rank}.onnx")
    return graphs


def traced_precision(resolved: ResolvedRecipe) -> str:
    """Of the step graph's matrices. What becomes fp16 is traced as fp32, so that the reference is
    the model as it is."""
    return "fp32" if resolved.precision == "fp16" else resolved.precision


def begin_manifest(
    config: DecoderConfig,
    resolved: ResolvedRecipe,
    quant_plan: QuantPlan,
    kv: KVLayout,
    target: Target,
) -> Manifest:
    """The manifest of an engine that has no ranks and files yet."""
    return Manifest(
        schema_version=SCHEMA_VERSION,
        llmbuild_version=__version__,
        name=resolved.name,
        model=asdict(config),
        vocab_size=config.vocab_size,
        precision=resolved.precision,
        quantised=_quantised(quant_plan),
        target=target,
        limits=Limits(
            max_sequence_length=resolved.limits.max_sequence_length,
            max_step_tokens=resolved.limits.max_step_tokens,
            max_sequences=resolved.limits.max_sequences,
        ),
        buckets=list(resolved.buckets),
        kv=kv,
        parallel=resolved.parallel.of_ranks,
        ranks=[],
        files={},
        rotated=resolved.quantisation.rotation,
        distilled=resolved.distillation is not None,
    )


def _quantised(plan: QuantPlan) -> dict[str, QuantisedTensor]:
    return {
        name: QuantisedTensor(
            bits=grid.bits,
            group_size=grid.group_size,
            symmetric=grid.symmetric,
            zero_points=grid.zero_points,
            activation_group=plan.activation_groups.get(name, 0),
            static_activations=name in plan.activation_scales,
            is_fp8=grid.is_fp8,
            method=plan.methods.get(name, ""),
        )
        for name, grid in plan.weights.items()
    }
