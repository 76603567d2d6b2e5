"""Plans of TensorRT: with our kernels as plugins and paged KV pools, built on the GPU that they are
for. Untried: no machine here has TensorRT or a GPU."""

from collections.abc import Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from llmbuild.builder.emulate_apart import emulate_apart
from llmbuild.builder.plan_build import PlanBuild, Script, activations_of
from llmbuild.builder.recipe.recipe import Recipe, ResolvedRecipe
from llmbuild.builder.recipe.target import CAPABILITIES, NATIVE, may_have_fp8
from llmbuild.builder.shard.graphs import RankGraph
from llmbuild.builder.targets.gpu.capabilities import capability
from llmbuild.builder.targets.gpu.triton_compiler import require_triton
from llmbuild.builder.targets.tensorrt.build_paged import build_paged_plan, installed_tensorrt
from llmbuild.builder.targets.tensorrt.built_plan import BuiltPlan
from llmbuild.builder.targets.tensorrt.emulation.emulate import (
    Emulated,
    emulate_paged,
    lower_to_emulation,
)
from llmbuild.builder.targets.tensorrt.emulation.network import Total
from llmbuild.builder.targets.tensorrt.emulation.pools import EmulatedPools
from llmbuild.builder.targets.tensorrt.emulation.ranks import EmulatedRanks
from llmbuild.builder.targets.tensorrt.paged_limits import PagedLimits
from llmbuild.builder.verify import make_batches
from llmbuild.cache import cache_root
from llmbuild.errors import BuildError, EngineError
from llmbuild.runtime.executors.paged_kv import PagedSteps
from llmbuild.runtime.gpu import compute_capability
from llmbuild.runtime.manifest import KVLayer, KVLayout, Manifest
from llmbuild.runtime.replay import VerificationSteps
from llmbuild.runtime.target import TENSORRT, TensorrtTarget

# Of the steps to verify with. Triton's interpreter takes milliseconds a program of a kernel.
_MOST_TOKENS, _MOST_BUCKETS = 64, 2


class PagedPlans:
    """A PlanTarget."""

    def __init__(self, recipe: Recipe) -> None:
        trt, _ = installed_tensorrt()
        require_triton()
        self._version = str(trt.__version__)
        self._capability = _capability(recipe.target.capabilities or (NATIVE,))
        if recipe.quantisation.has_fp8 and not may_have_fp8(self._capability):
            able = [each for each in CAPABILITIES[TENSORRT] if each != NATIVE]
            raise BuildError(
                f"quantisation: FP8 was chosen, and the GPU here has {self._capability}; compile "
                f"on one of {', '.join(filter(may_have_fp8, able))}, or choose int4 or int8"
            )

    def record(self, resolved: ResolvedRecipe) -> TensorrtTarget:
        return TensorrtTarget(version=self._version, capability=self._capability)

    def check(self, build: PlanBuild) -> None:
        """Lowers once: what there is no kernel for is told by name here, not by a process that
        emulates."""
        for graph in build.graphs:
            limits = paged_limits(build.resolved, graph, self._capability)
            lower_to_emulation(
                graph.step, graph.config, limits, activations_of(build.resolved), graph.read
            )

    def script(self, manifest: Manifest) -> Script:
        limits = manifest.limits
        tokens = min(limits.max_step_tokens, _MOST_TOKENS)
        limits = msgspec.structs.replace(limits, max_step_tokens=tokens)
        kv = _of_reference(manifest.kv)
        buckets = manifest.buckets[:_MOST_BUCKETS]
        batches, num_blocks = make_batches(limits, kv, manifest.vocab_size, buckets)
        return Script(kv, batches, num_blocks, batches, num_blocks)

    def emulate(self, build: PlanBuild, steps: VerificationSteps) -> list[NDArray[np.float32]]:
        return emulate_apart(build.root, build.manifest, build.base_dir)

    def build(self, build: PlanBuild, graph: RankGraph) -> BuiltPlan:
        return build_paged_plan(
            *(graph.step, graph.config, paged_limits(build.resolved, graph, self._capability)),
            *(activations_of(build.resolved), graph.read),
            cache_root() / TENSORRT / f"{self._version}-{self._capability}.timing",
        )


def paged_limits(resolved: ResolvedRecipe, graph: RankGraph, capability: str) -> PagedLimits:
    """What the plan of a rank is built for."""
    limits = resolved.limits
    return PagedLimits(
        sequences=limits.max_sequences,
        tokens=limits.max_step_tokens,
        blocks=-(-limits.max_sequence_length // graph.kv.block_size),
        kv=graph.kv,
        sm=_sm(capability),
    )


def emulate_blocks(
    graphs: Sequence[RankGraph],
    resolved: ResolvedRecipe,
    capability: str,
    steps: VerificationSteps,
) -> list[NDArray[np.float32]]:
    """The logits of each step, of the networks that the ranks' plans are built of; their plugins
    run in Triton's interpreter. Raises BuildError where Triton doesn't interpret."""

    def make(graph: RankGraph, total: Total) -> Emulated:
        limits = paged_limits(resolved, graph, capability)
        arguments = (limits, activations_of(resolved), graph.read, total)
        return emulate_paged(graph.step, graph.config, *arguments)

    ranks = EmulatedRanks(graphs, make)
    pools = [EmulatedPools(graph.kv, steps.num_blocks) for graph in graphs]
    # No more sequences than there are: the interpreter takes its time for padding as well.
    most = max(batch.num_sequences for batch in steps.batches)
    limits = paged_limits(resolved, graphs[0], capability)
    paged = PagedSteps(limits.tokens, most, limits.blocks, resolved.buckets)
    vocab_size = sum(len(graph.shard.tokens) for graph in graphs if graph.shard.is_last_stage)
    made = []
    for batch in steps.batches:
        logits = np.zeros((batch.num_logit_rows, vocab_size), np.float32)
        for execution in paged.executions(batch):
            given, _ = ranks.run(execution.inputs, [each.addresses for each in pools])
            logits[execution.results] = given[: len(execution.results)]
        made.append(logits)
    return made


def _capability(asked: tuple[str, ...]) -> str:
    """Of the GPU at hand. Raises BuildError unless it is the one that was asked for."""
    try:
        found = compute_capability()
    except EngineError as error:
        raise BuildError(
            f"the {TENSORRT} target builds on the GPU that its plans are for, and this machine has "
            "none that works; compile there, or choose target cpu or tensorrt-rtx"
        ) from error
    if asked not in ((NATIVE,), (found,)):
        raise BuildError(
            f"target.capabilities: {asked[0]} was chosen, and the GPU here has {found}; compile on "
            "a GPU of the first, or leave it out"
        )
    capability(_sm(found))
    return found


def _sm(capability: str) -> int:
    """89 of 8.9."""
    return int(capability.replace(".", ""))


def _of_reference(kv: KVLayout) -> KVLayout:
    """The same with fp32 where the plan's has fp16."""

    def wide(dtypes: list[str]) -> list[str]:
        return ["fp32" if dtype == "fp16" else dtype for dtype in dtypes]

    layers = [
        KVLayer.of_heads(zip(wide(layer.k_dtypes), wide(layer.v_dtypes), strict=True))
        for layer in kv.layers
    ]
    return msgspec.structs.replace(kv, layers=layers)
