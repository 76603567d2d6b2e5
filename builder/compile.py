"""The build, top to bottom: a recipe in, an engine directory out."""

import os
import platform
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path

from llmbuild.builder.artifact import EngineWriter
from llmbuild.builder.cache import cache_root
from llmbuild.builder.checkpoint import open_checkpoint
from llmbuild.builder.checkpoint.tokenizer import write_tokenizer
from llmbuild.builder.graph.materialise import materialise
from llmbuild.builder.graph.pipeline import run_passes
from llmbuild.builder.graph.trace import trace
from llmbuild.builder.models.config import DecoderConfig
from llmbuild.builder.models.families import family_of
from llmbuild.builder.models.weights import ModelWeights
from llmbuild.builder.recipe import ResolvedRecipe, effective_yaml, load_recipe
from llmbuild.builder.report import Report, decode_steps, write_report
from llmbuild.builder.sources import fetch, parse_source
from llmbuild.builder.sources.progress import PlainProgress, Progress
from llmbuild.builder.stages import Stages, peak_rss_bytes
from llmbuild.builder.targets.cpu import toolchain
from llmbuild.builder.targets.cpu.emit import emit
from llmbuild.builder.targets.cpu.lower import lower
from llmbuild.builder.targets.cpu.memory import ArenaPlan, plan_arena
from llmbuild.builder.targets.cpu.pack import packed_bytes, write_weights
from llmbuild.builder.targets.cpu.plan import StepPlan
from llmbuild.builder.verify import make_batches, reference_logits, stored_steps, verify_level
from llmbuild.runtime.isa import supported_levels
from llmbuild.runtime.manifest import (
    SCHEMA_VERSION,
    KVLayer,
    KVLayout,
    Limits,
    Manifest,
    Rank,
    Target,
)
from llmbuild.runtime.replay import STEPS_FILE, save_steps
from llmbuild.version import __version__

WEIGHTS = "rank0/weights.safetensors"


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
    compiler = toolchain.find_compiler()
    stages = Stages(progress or PlainProgress())

    with EngineWriter(Path(out) if out else Path("engines") / recipe.name) as writer:
        root = writer.root
        with stages.stage("fetch"):
            source = fetch(
                parse_source(recipe.model.source),
                recipe.model.sha256,
                base_dir=recipe_path.parent,
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
            (root / "recipe.yaml").write_text(effective_yaml(resolved))
        limits, kv = _limits(resolved), _kv_layout(resolved, config)

        with stages.stage("trace and passes"):
            step = trace(config, resolved.precision)
            run_passes(step, dump_dir)
            (root / "graph").mkdir()
            step.save(root / "graph" / "step.onnx")
        with stages.stage("lower and emit"):
            plan = lower(step, config, kv.layers[0].k_dtype, kv.block_size)
            arena = plan_arena(plan, limits)
            code = emit(plan, arena, limits, recipe.name)
            (root / "rank0").mkdir()
        executables = {level: f"rank0/engine.{level}.so" for level in levels}
        for level, path in executables.items():
            with stages.stage(f"compile {level}"):
                toolchain.compile(code, level, root / path)
        with stages.stage("pack weights"):
            read = partial(materialise, step, read=weights.read)
            with stages.progress.task("packing", sum(map(packed_bytes, plan.weights))) as advance:
                write_weights(plan, read, root / WEIGHTS, advance)

        manifest = Manifest(
            schema_version=SCHEMA_VERSION,
            llmbuild_version=__version__,
            name=recipe.name,
            model=asdict(config),
            vocab_size=config.vocab_size,
            precision=resolved.precision,
            target=Target(
                kind=resolved.target.kind,
                machine=platform.machine(),
                isa_levels=levels,
                compiler=compiler.name,
                compiler_flags={level: toolchain.flags(level) for level in levels},
            ),
            limits=limits,
            buckets=list(resolved.buckets),
            kv=kv,
            ranks=[
                Rank(executables=executables, weights=WEIGHTS, arena_bytes=arena.size_bytes)
            ],
            files={},
        )
        tolerance = resolved.verify.tolerance
        with stages.stage("reference"):
            batches, num_blocks = make_batches(limits, kv, config.vocab_size, manifest.buckets)
            expected = reference_logits(step, weights.read, batches, kv, num_blocks)
            save_steps(stored_steps(batches, expected, num_blocks, tolerance), root / STEPS_FILE)
        verified: dict[str, float | None] = dict.fromkeys(levels)
        for level in set(levels).intersection(supported_levels()):
            with stages.stage(f"verify {level}"):
                verified[level] = verify_level(root, manifest, level, expected, tolerance)
        report = Report(
            name=recipe.name,
            weights_bytes=sum(map(packed_bytes, plan.weights)),
            weights_by_dtype=_by_dtype(plan),
            arena_bytes=arena.size_bytes,
            kv_bytes_per_token=kv.block_bytes // kv.block_size,
            decode=decode_steps(plan, config, kv, limits.max_sequence_length),
            verified=verified,
            tolerance=tolerance,
            seconds=stages.seconds,
            peak_rss_bytes=peak_rss_bytes(),
        )
        write_report(report, root)
        with stages.stage("publish"):
            writer.publish(manifest)
    return writer.out


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


def _by_dtype(plan: StepPlan) -> dict[str, int]:
    sizes: dict[str, int] = {}
    for weight in plan.weights:
        sizes[weight.dtype] = sizes.get(weight.dtype, 0) + packed_bytes(weight)
    return sizes
