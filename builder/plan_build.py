"""What the builds of the targets' plans have in common, and what they differ in."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from llmbuild.builder.recipe.recipe import ResolvedRecipe
from llmbuild.builder.shard.graphs import RankGraph
from llmbuild.builder.targets.tensorrt.built_plan import BuiltPlan
from llmbuild.builder.targets.tensorrt.limits import ActivationDtype
from llmbuild.runtime.batch import StepBatch
from llmbuild.runtime.manifest import KVLayout, Manifest
from llmbuild.runtime.replay import VerificationSteps
from llmbuild.runtime.target import Target


@dataclass(frozen=True)
class Script:
    """Steps to verify with, on the blocks of the reference's KV cache, of this layout, and the same
    on those of the plan's."""

    kv: KVLayout
    batches: list[StepBatch]
    num_blocks: int
    plan_batches: list[StepBatch]
    plan_blocks: int


@dataclass(frozen=True)
class PlanBuild:
    """A build whose graphs are ready. root: where the engine is written. base_dir: the recipe's
    folder."""

    resolved: ResolvedRecipe
    manifest: Manifest
    graphs: Sequence[RankGraph]
    root: Path
    base_dir: Path


class PlanTarget(Protocol):
    """A target whose executables are plans. Making one raises BuildError where the machine lacks
    what builds them."""

    def record(self, resolved: ResolvedRecipe) -> Target:
        """The target as the manifest has it."""
        ...

    def check(self, build: PlanBuild) -> None:
        """Raises RecipeError or BuildError for what plans can't have."""
        ...

    def script(self, manifest: Manifest) -> Script: ...

    def emulate(self, build: PlanBuild, steps: VerificationSteps) -> list[NDArray[np.float32]]:
        """The logits [R, vocab] of each step, of the networks that the plans are built of."""
        ...

    def build(self, build: PlanBuild, graph: RankGraph) -> BuiltPlan:
        """A rank's plan."""
        ...


def activations_of(resolved: ResolvedRecipe) -> ActivationDtype:
    """The dtype of a network's activations."""
    assert resolved.precision != "fp32", "the recipe would be refused"
    return resolved.precision
