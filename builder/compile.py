"""The build, top to bottom: a recipe in, an engine directory out."""

import os
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from llmbuild.builder.artifact import EngineWriter
from llmbuild.builder.checkpoint import open_checkpoint
from llmbuild.builder.checkpoint.tokenizer import write_tokenizer
from llmbuild.builder.graph.pipeline import run_passes
from llmbuild.builder.graph.trace import trace
from llmbuild.builder.models.config import DecoderConfig
from llmbuild.builder.models.families import family_of
from llmbuild.builder.models.weights import ModelWeights
from llmbuild.builder.quantisation import plan_quantisation
from llmbuild.builder.recipe import Recipe, ResolvedRecipe, effective_yaml, load_recipe
from llmbuild.builder.report import make_report, write_report
from llmbuild.builder.sources import fetch, parse_source
from llmbuild.builder.sources.progress import PlainProgress, Progress
from llmbuild.builder.stages import Stages, peak_rss_bytes
from llmbuild.builder.targets.cpu import toolchain
from llmbuild.builder.targets.cpu.build import build_cpu
from llmbuild.builder.verify import verify_engine
from llmbuild.cache import cache_root
from llmbuild.quant.plan import QuantPlan
from llmbuild.quant.reader import planned_reader
from llmbuild.runtime.manifest import (
    SCHEMA_VERSION,
    KVLayer,
    KVLayout,
    Limits,
    Manifest,
    QuantisedTensor,
)
from llmbuild.version import __version__


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
    after each pass. Raises UserError for what the user can mend, InternalError when the compiled
    code diverges from the reference; either way nothing is published.
    """
    recipe_path = Path(recipe_path)
    recipe = load_recipe(recipe_path, overrides)
    levels = toolchain.resolve_levels(recipe.target.isa)
    toolchain.find_compiler()
    stages = Stages(progress or PlainProgress())

    with EngineWriter(Path(out) if out else Path("engines") / recipe.name) as writer:
        root = writer.root
        resolved, config, weights = _read_model(recipe, recipe_path.parent, root, stages)
        limits, kv = _limits(resolved), _kv_layout(resolved, config)
        with stages.stage("trace and passes"):
            step = trace(config, resolved.precision)
            plan = plan_quantisation(resolved.quantisation, step, weights)
            run_passes(step, dump_dir, plan)
            step.save(root / "graph" / "step.onnx")
        read = planned_reader(weights, plan)
        built = build_cpu(
            step,
            config,
            read,
            name=recipe.name,
            limits=limits,
            kv=kv,
            levels=levels,
            root=root,
            stages=stages,
        )
        manifest = Manifest(
            schema_version=SCHEMA_VERSION,
            llmbuild_version=__version__,
            name=recipe.name,
            model=asdict(config),
            vocab_size=config.vocab_size,
            precision=resolved.precision,
            quantised=_quantised(plan),
            target=built.target,
            limits=limits,
            buckets=list(resolved.buckets),
            kv=kv,
            ranks=[built.rank],
            files={},
        )
        for kind, count in manifest.quantised_kinds.items():
            stages.progress.note(f"quantised: {count} tensors to {kind}")
        tolerance = resolved.verify.tolerance
        verified = verify_engine(root, manifest, step, read, tolerance, stages)
        report = make_report(manifest, built.plan, config, verified, tolerance, stages.seconds)
        write_report(report, root)
        with stages.stage("publish"):
            writer.publish(manifest)
    stages.progress.note(f"peak memory {peak_rss_bytes() / 1e6:.0f} MB")
    return writer.out


def _read_model(
    recipe: Recipe, base_dir: Path, root: Path, stages: Stages
) -> tuple[ResolvedRecipe, DecoderConfig, ModelWeights]:
    """Fetch and open the recipe's model; leaves tokenizer and effective recipe below `root`."""
    with stages.stage("fetch", shows_bars=True):
        source = fetch(
            parse_source(recipe.model.source),
            recipe.model.sha256,
            base_dir=base_dir,
            cache_dir=cache_root(),
            progress=stages.progress,
        )
    with stages.stage("read checkpoint"):
        checkpoint = open_checkpoint(source)
        family = family_of(checkpoint.config)
        config = family.translate(checkpoint.config)
        resolved = recipe.resolve(config.max_position)
        weights = ModelWeights(checkpoint, family, config)
        write_tokenizer(source, root)
    _state_recipe(resolved, root, stages.progress)
    return resolved, config, weights


def _state_recipe(resolved: ResolvedRecipe, root: Path, progress: Progress) -> None:
    """Print the effective recipe, and keep it in the engine."""
    text = effective_yaml(resolved)
    progress.note("effective recipe:\n" + "".join(f"  {line}\n" for line in text.splitlines()))
    (root / "recipe.yaml").write_text(text)


def _quantised(plan: QuantPlan) -> dict[str, QuantisedTensor]:
    return {
        name: QuantisedTensor(
            bits=grid.bits,
            group_size=grid.group_size,
            symmetric=grid.symmetric,
            activation_group=plan.activation_groups.get(name, 0),
        )
        for name, grid in plan.weights.items()
    }


def _limits(resolved: ResolvedRecipe) -> Limits:
    return Limits(
        max_sequence_length=resolved.limits.max_sequence_length,
        max_step_tokens=resolved.limits.max_step_tokens,
        max_sequences=resolved.limits.max_sequences,
    )


def _kv_layout(resolved: ResolvedRecipe, config: DecoderConfig) -> KVLayout:
    layer = KVLayer(k_dtype=resolved.kv_cache.dtype, v_dtype=resolved.kv_cache.dtype)
    return KVLayout(
        block_size=resolved.kv_cache.block_size,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        layers=[layer] * config.num_layers,
    )
