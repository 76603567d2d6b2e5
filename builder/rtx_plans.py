"""Plans of TensorRT for RTX: with native layers and linear KV caches, built without a GPU."""

from collections.abc import Sequence
from dataclasses import replace
from math import gcd

import msgspec
import numpy as np
from numpy.typing import NDArray

from llmbuild.builder.plan_build import PlanBuild, Script, activations_of
from llmbuild.builder.recipe.recipe import ResolvedRecipe
from llmbuild.builder.shard.graphs import RankGraph
from llmbuild.builder.targets.tensorrt.build import build_plan, installed_tensorrt_rtx
from llmbuild.builder.targets.tensorrt.built_plan import BuiltPlan
from llmbuild.builder.targets.tensorrt.emulation.emulate import Emulated, emulate
from llmbuild.builder.targets.tensorrt.emulation.network import Total
from llmbuild.builder.targets.tensorrt.emulation.ranks import EmulatedRanks
from llmbuild.builder.targets.tensorrt.emulation.slot_caches import SlotCaches
from llmbuild.builder.targets.tensorrt.limits import Limits
from llmbuild.builder.verify import make_batches
from llmbuild.errors import RecipeError
from llmbuild.runtime.batch import ARRAYS, StepBatch
from llmbuild.runtime.executors.linear_kv import LinearSlots
from llmbuild.runtime.manifest import KVLayer, KVLayout, Manifest
from llmbuild.runtime.replay import VerificationSteps
from llmbuild.runtime.target import ALIGNMENT_BYTES, RtxTarget

_ACTIVATION_BYTES = 2  # fp16 or bf16
_BLOCK_SIZE = 16  # of the reference's KV cache


class RtxPlans:
    """A PlanTarget."""

    def __init__(self) -> None:
        self._version = str(installed_tensorrt_rtx().__version__)

    def record(self, resolved: ResolvedRecipe) -> RtxTarget:
        assert resolved.target.capabilities is not None
        return RtxTarget(version=self._version, capabilities=list(resolved.target.capabilities))

    def check(self, build: PlanBuild) -> None:
        """Slots of a cache have to begin where a plan may be bound, and heads to be such as
        TensorRT's attention takes."""
        capacity = plan_limits(build.resolved).capacity
        for graph in build.graphs:
            if graph.config.head_dim % 8:
                raise RecipeError(
                    f"target: tensorrt-rtx takes heads of a multiple of 8 elements, and this "
                    f"model's have {graph.config.head_dim}; choose target cpu"
                )
            position_bytes = graph.config.num_kv_heads * graph.config.head_dim * _ACTIVATION_BYTES
            step = ALIGNMENT_BYTES // gcd(ALIGNMENT_BYTES, position_bytes)
            if capacity % step:
                raise RecipeError(
                    f"limits.max_sequence_length: {capacity} was chosen; on tensorrt-rtx it has to "
                    f"be a multiple of {step} for this model, so that each sequence's keys begin "
                    f"at a multiple of {ALIGNMENT_BYTES} bytes"
                )

    def script(self, manifest: Manifest) -> Script:
        """A sequence's slot is its only block."""
        kv = _paged(manifest.kv)
        batches, num_blocks = make_batches(
            manifest.limits, kv, manifest.vocab_size, manifest.buckets, is_padded=False
        )
        in_slots, num_slots = with_slots(batches)
        return Script(kv, batches, num_blocks, in_slots, num_slots + 1)

    def emulate(self, build: PlanBuild, steps: VerificationSteps) -> list[NDArray[np.float32]]:
        return emulate_rtx(build.graphs, build.resolved, steps)

    def build(self, build: PlanBuild, graph: RankGraph) -> BuiltPlan:
        resolved = build.resolved
        assert resolved.target.capabilities is not None
        return build_plan(
            *(graph.step, graph.config, plan_limits(resolved), activations_of(resolved)),
            *(graph.read, resolved.target.capabilities),
        )


def plan_limits(resolved: ResolvedRecipe) -> Limits:
    """What the plans of a recipe are built for."""
    limits = resolved.limits
    return Limits(
        batch=limits.max_sequences,
        chunk=min(limits.max_step_tokens, limits.max_sequence_length),
        capacity=limits.max_sequence_length,
    )


def emulate_rtx(
    graphs: Sequence[RankGraph], resolved: ResolvedRecipe, steps: VerificationSteps
) -> list[NDArray[np.float32]]:
    """The logits of each step, of the networks that the ranks' plans are built of; but their KV
    caches are no longer than the steps need."""
    limits, num_slots = plan_limits(resolved), steps.num_blocks - 1
    longest = max(int(batch.kv_lengths.max()) for batch in steps.batches)
    limits = replace(limits, capacity=longest, chunk=min(limits.chunk, longest))
    activations = activations_of(resolved)

    def make(graph: RankGraph, total: Total) -> Emulated:
        return emulate(graph.step, graph.config, limits, activations, graph.read, total)

    ranks = EmulatedRanks(graphs, make)
    caches = [SlotCaches(graph.config, longest, activations, num_slots) for graph in graphs]
    slots = LinearSlots(num_slots, longest, resolved.buckets, limits.batch)
    vocab_size = sum(len(graph.shard.tokens) for graph in graphs if graph.shard.is_last_stage)
    made = []
    for batch in steps.batches:
        logits = np.zeros((batch.num_logit_rows, vocab_size), np.float32)
        for execution in slots.executions(batch):
            span = execution.first_slot, execution.first_slot + execution.num_slots
            given, outputs = ranks.run(execution.inputs, [each.slots(*span) for each in caches])
            logits[execution.results] = given[: len(execution.results)]
            for cache, updated in zip(caches, outputs, strict=True):
                cache.update(*span, updated)
        made.append(logits)
    return made


def with_slots(batches: Sequence[StepBatch]) -> tuple[list[StepBatch], int]:
    """The same steps with one block for each sequence, and how many there are. A sequence is known
    by its first block."""
    blocks: dict[int, int] = {}
    made = []
    for batch in batches:
        firsts = batch.block_tables[:, 0].tolist()
        tables = [[1 + blocks.setdefault(first, len(blocks))] for first in firsts]
        arrays = {name: getattr(batch, name) for name in ARRAYS}
        made.append(StepBatch(**arrays | {"block_tables": np.array(tables, np.int32)}))
    return made, len(blocks)


def _paged(kv: KVLayout) -> KVLayout:
    """The reference's: in blocks, and in fp32 where the plan's has fp16."""
    dtypes = [("fp32", "fp32")] * kv.num_kv_heads
    layers = [KVLayer.of_heads(dtypes) for _ in kv.layers]
    block_size = min(_BLOCK_SIZE, kv.block_size)
    return msgspec.structs.replace(kv, block_size=block_size, layers=layers)
