"""Run an engine of plans without a GPU: the networks that its plans were built of, made again from
its recipe, on the steps that it carries."""

import json
import tempfile
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from llmbuild.builder.assemble import begin_manifest, make_graphs
from llmbuild.builder.open_model import open_model
from llmbuild.builder.paged_plans import emulate_blocks
from llmbuild.builder.prepare import prepare
from llmbuild.builder.recipe.recipe import load_recipe
from llmbuild.builder.rtx_plans import emulate_rtx
from llmbuild.builder.sources.progress import Progress
from llmbuild.builder.stages import Stages
from llmbuild.errors import EngineError
from llmbuild.runtime.manifest import Manifest, encode
from llmbuild.runtime.replay import VerificationSteps
from llmbuild.runtime.target import TensorrtTarget

# What follows from the recipe and its model alone.
_OF_THE_RECIPE = ("model", "precision", "quantised", "limits", "buckets", "kv", "parallel")


def emulate_engine(
    root: Path,
    manifest: Manifest,
    steps: VerificationSteps,
    base_dir: Path,
    progress: Progress,
) -> list[NDArray[np.float32]]:
    """The logits [R, vocab] of each step. base_dir: where a model lies that the recipe names by a
    relative path. Raises UserError where the model can't be had, and EngineError where the recipe
    isn't what the manifest was made of."""
    recipe = load_recipe(root / "recipe.yaml")
    stages = Stages(progress)
    model = open_model(recipe, base_dir, stages)
    resolved = recipe.resolve(model.config.max_position)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        prepared = prepare(model, resolved, base_dir, folder, stages)
        expected = begin_manifest(
            model.config, resolved, prepared.plan, prepared.kv, manifest.target
        )
        _check_same(expected, manifest)
        graphs = make_graphs(
            *(model.config, resolved, prepared.step, prepared.plan, prepared.kv, prepared.read),
            *(prepared.kv_scales, folder, stages),
        )
    with stages.stage("emulate"):
        if isinstance(manifest.target, TensorrtTarget):
            return emulate_blocks(graphs, resolved, manifest.target.capability, steps)
        return emulate_rtx(graphs, resolved, steps)


def _check_same(expected: Manifest, manifest: Manifest) -> None:
    ours, theirs = json.loads(encode(expected)), json.loads(encode(manifest))
    differing = [key for key in _OF_THE_RECIPE if ours[key] != theirs[key]]
    if differing:
        raise EngineError(
            f"the engine's recipe.yaml makes another {', '.join(differing)} than its manifest has; "
            "compile it again"
        )
