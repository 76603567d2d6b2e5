"""The build's check of plans, which nothing here can run: the networks that they are built of, run
on the CPU, against the torch reference."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray

from llmbuild.builder.prepare import Prepared
from llmbuild.builder.shard.graphs import RankGraph
from llmbuild.builder.stages import Stages
from llmbuild.builder.targets.tensorrt.emulation.ranks import EmulatedRanks
from llmbuild.builder.targets.tensorrt.limits import ActivationDtype, Limits
from llmbuild.builder.verify import make_batches, run_reference, stored_steps
from llmbuild.errors import InternalError
from llmbuild.runtime.batch import ARRAYS, StepBatch
from llmbuild.runtime.executors.linear_kv import LinearSlots
from llmbuild.runtime.manifest import KVLayer, KVLayout, Manifest
from llmbuild.runtime.replay import STEPS_FILE, relative_difference, save_steps

_BLOCK_SIZE = 16  # of the reference's KV cache


def verify_plans(
    root: Path,
    manifest: Manifest,
    prepared: Prepared,
    graphs: Sequence[RankGraph],
    activations: ActivationDtype,
    tolerance: float,
    limits: Limits,
    stages: Stages,
) -> float:
    """The largest relative difference of the logits of the ranks' emulated networks. Leaves the
    steps below `root`, for `llmbuild verify` where there is a GPU.

    Raises InternalError when it is larger than `tolerance`.
    """
    paged = _paged(manifest.kv)
    batches, num_blocks = make_batches(
        manifest.limits, paged, manifest.vocab_size, manifest.buckets, is_padded=False
    )
    expected = run_reference(prepared.step, prepared.read, batches, paged, num_blocks, stages)
    batches, num_slots = with_slots(batches)
    save_steps(stored_steps(batches, expected, num_slots + 1, tolerance), root / STEPS_FILE)
    with stages.stage("emulate"):
        got = emulate_steps(graphs, limits, activations, batches, num_slots, manifest.buckets)
    worst = max(map(relative_difference, got, expected))
    stages.progress.note(f"emulated network: logits differ by {worst:.1e} of the largest")
    if not worst <= tolerance:
        raise InternalError(
            f"the emulated network's logits differ from the reference's by {worst:.2e} of the "
            f"largest, and verify.tolerance is {tolerance:.2e}; nothing was published"
        )
    return worst


def emulate_steps(
    graphs: Sequence[RankGraph],
    limits: Limits,
    activations: ActivationDtype,
    batches: Sequence[StepBatch],
    num_slots: int,
    buckets: Sequence[int],
) -> list[NDArray[np.float32]]:
    """The logits of each step, of the networks that the ranks' plans are built of; but their KV
    caches are no longer than the steps need."""
    longest = max(int(batch.kv_lengths.max()) for batch in batches)
    limits = replace(limits, capacity=longest, chunk=min(limits.chunk, longest))
    ranks = EmulatedRanks(graphs, limits, activations, num_slots)
    slots = LinearSlots(num_slots, longest, buckets, limits.batch)
    return [ranks.step(batch, slots.executions(batch)) for batch in batches]


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
