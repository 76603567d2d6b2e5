"""From a model and a resolved recipe to an engine's files and manifest, in a folder."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from llmbuild.builder.checkpoint.tokenizer import write_tokenizer
from llmbuild.builder.graph.materialise import ReadTensor
from llmbuild.builder.graph.pipeline import run_passes
from llmbuild.builder.graph.step_graph import StepGraph
from llmbuild.builder.models.config import DecoderConfig
from llmbuild.builder.models.weights import ModelWeights
from llmbuild.builder.recipe.recipe import ResolvedRecipe
from llmbuild.builder.stages import Stages
from llmbuild.builder.targets.cpu.build import build_cpu
from llmbuild.builder.targets.cpu.plan import StepPlan
from llmbuild.quant.plan import QuantPlan
from llmbuild.runtime.manifest import SCHEMA_VERSION, KVLayout, Limits, Manifest, QuantisedTensor
from llmbuild.version import __version__


@dataclass(frozen=True)
class Model:
    """A model that is open: where it lies, what it is, and its weights."""

    path: Path
    config: DecoderConfig
    weights: ModelWeights


@dataclass(frozen=True)
class Assembled:
    """An engine whose files are written; its manifest isn't. product_losses: of the matrices that
    calibration rounded, the relative squared error of their products with its inputs."""

    manifest: Manifest
    step: StepGraph
    quant_plan: QuantPlan
    plan: StepPlan
    read: ReadTensor
    product_losses: Mapping[str, float] = field(default_factory=dict)


def assemble(
    model: Model,
    resolved: ResolvedRecipe,
    step: StepGraph,
    quant_plan: QuantPlan,
    kv: KVLayout,
    read: ReadTensor,
    *,
    kv_scales: Mapping[str, NDArray[np.float32]],
    levels: Sequence[str],
    root: Path,
    stages: Stages,
    dump_dir: Path | None = None,
) -> Assembled:
    """Write the engine below `root`: graph, executables, weights and tokenizer.

    step: as traced; the passes change it. read: gives tensors as the plan has them. levels: ISA
    levels, best first. kv_scales: the KV cache's channel scales. dump_dir: where to write the step
    graph after each pass.
    """
    write_tokenizer(model.path, root)
    with stages.stage("passes"):
        run_passes(step, dump_dir, quant_plan, kv_scales)
        step.save(root / "graph" / "step.onnx")
    limits = Limits(
        max_sequence_length=resolved.limits.max_sequence_length,
        max_step_tokens=resolved.limits.max_step_tokens,
        max_sequences=resolved.limits.max_sequences,
    )
    built = build_cpu(
        step,
        model.config,
        read,
        name=resolved.name,
        limits=limits,
        kv=kv,
        levels=levels,
        root=root,
        stages=stages,
    )
    manifest = Manifest(
        schema_version=SCHEMA_VERSION,
        llmbuild_version=__version__,
        name=resolved.name,
        model=asdict(model.config),
        vocab_size=model.config.vocab_size,
        precision=resolved.precision,
        quantised=_quantised(quant_plan),
        target=built.target,
        limits=limits,
        buckets=list(resolved.buckets),
        kv=kv,
        ranks=[built.rank],
        files={},
    )
    return Assembled(manifest, step, quant_plan, built.plan, read)


def _quantised(plan: QuantPlan) -> dict[str, QuantisedTensor]:
    return {
        name: QuantisedTensor(
            bits=grid.bits,
            group_size=grid.group_size,
            symmetric=grid.symmetric,
            zero_points=grid.zero_points,
            activation_group=plan.activation_groups.get(name, 0),
            static_activations=name in plan.activation_scales,
        )
        for name, grid in plan.weights.items()
    }
