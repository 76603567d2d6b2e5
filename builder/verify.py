"""The build's check of itself: the compiled engine's logits against the torch reference."""

import subprocess
import sys
import tempfile
from collections.abc import Sequence
from itertools import cycle
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray

from llmbuild.builder.graph.materialise import ReadTensor
from llmbuild.builder.graph.reference import run_steps, weight_items
from llmbuild.builder.graph.step_graph import StepGraph
from llmbuild.builder.stages import Stages
from llmbuild.builder.tolerance import require_within
from llmbuild.errors import InternalError
from llmbuild.plugins.common.kv_pools import LayerPools
from llmbuild.runtime.batch import StepBatch
from llmbuild.runtime.bucket import pad_to_bucket
from llmbuild.runtime.isa import supported_levels
from llmbuild.runtime.manifest import SCRATCH_BLOCK, KVLayout, Limits, Manifest
from llmbuild.runtime.replay import (
    STEPS_FILE,
    VerificationSteps,
    relative_difference,
    save_steps,
)

MAX_STORED_COLUMNS = 4096
TIMEOUT_S = 1800
_SEED = 20170612
_FP32_BYTES = 4  # the reference computes in fp32, so its progress is counted in that
# Tokens of a sequence in the largest step, where that is enough to fill it: the reference holds the
# scores of all pairs of them.
_LONGEST = 512


class _Script:
    """Sequences of random tokens that move forward step by step, each in blocks of its own."""

    def __init__(
        self, kv: KVLayout, vocab_size: int, sequences: int, capacity: int, first_block: int
    ) -> None:
        self.rng = np.random.default_rng(_SEED)
        self.vocab_size = vocab_size
        self.capacity = capacity  # tokens of a sequence
        self.lengths = [0] * sequences
        blocks = -(-capacity // kv.block_size)
        ids = self.rng.permutation(sequences * blocks) + first_block
        self.tables = ids.astype(np.int32).reshape(sequences, blocks)
        self.num_blocks = first_block + len(ids)

    def _begin_anew(self, sequence: int) -> None:
        """Empty, and in new blocks, so that no slot is ever written twice."""
        blocks = self.tables.shape[1]
        self.tables[sequence] = self.num_blocks + self.rng.permutation(blocks)
        self.num_blocks += blocks
        self.lengths[sequence] = 0

    def step(self, tokens: dict[int, int]) -> StepBatch:
        """One step that brings `tokens[sequence]` new tokens; logits of each one's last.
        A sequence that is full begins anew."""
        for sequence in tokens:
            if self.lengths[sequence] == self.capacity:
                self._begin_anew(sequence)
        positions = [np.arange(self.lengths[s], self.lengths[s] + n) for s, n in tokens.items()]
        for sequence, count in tokens.items():
            self.lengths[sequence] += count
        ends = np.cumsum(list(tokens.values()))
        return StepBatch(
            token_ids=self.rng.integers(0, self.vocab_size, ends[-1]).astype(np.int32),
            positions=np.concatenate(positions).astype(np.int32),
            query_start=np.concatenate([[0], ends]).astype(np.int32),
            kv_lengths=np.array([self.lengths[s] for s in tokens], np.int32),
            block_tables=self.tables[list(tokens)],
            logit_rows=(ends - 1).astype(np.int32),
        )


def make_batches(
    limits: Limits,
    kv: KVLayout,
    vocab_size: int,
    buckets: Sequence[int],
    *,
    is_padded: bool = True,
) -> tuple[list[StepBatch], int]:
    """Steps to verify with, and the KV blocks that they need, the scratch block included.
    is_padded: whether steps of fewer sequences than a bucket are filled up.

    Prompts of one token, of a block and one more or less, of several blocks in chunks; a step of
    decode and prefill mixed; every decode bucket; the largest bucket with padding; and a step of
    as many tokens as the limits allow, which fills the buffers of the memory plan.
    """
    sequences, block = max(buckets), kv.block_size
    capacity = min(5 * block, limits.max_sequence_length)
    script = _Script(kv, vocab_size, sequences, capacity, first_block=SCRATCH_BLOCK + 1)
    longest = max(1, script.capacity - len(buckets) - 2)  # each bucket and the mixed step add one
    chunk = min(limits.max_step_tokens, block + 3)
    batches: list[StepBatch] = []
    for sequence, length in zip(range(sequences), cycle(_prompt_lengths(block)), strict=False):
        for begin in range(0, min(length, longest), chunk):
            count = min(chunk, min(length, longest) - begin)
            joins = sequence == 1 and count < limits.max_step_tokens
            batches.append(script.step(({0: 1} if joins else {}) | {sequence: count}))
    for size in (*buckets, max(1, sequences - 1)):
        batch = script.step(dict.fromkeys(range(size), 1))
        batches.append(pad_to_bucket(batch, buckets) if is_padded else batch)
    largest, num_blocks = _largest_step(limits, kv, vocab_size, script.num_blocks)
    return [*batches, largest], num_blocks


def _largest_step(
    limits: Limits, kv: KVLayout, vocab_size: int, first_block: int
) -> tuple[StepBatch, int]:
    """As many tokens as a step may have, in few long sequences; and the blocks up to there."""
    shortest = -(-limits.max_step_tokens // limits.max_sequences)  # that fill the step
    capacity = min(max(_LONGEST, shortest), limits.max_sequence_length)
    count = min(-(-limits.max_step_tokens // capacity), limits.max_sequences)
    script = _Script(kv, vocab_size, count, capacity, first_block)
    total = limits.max_step_tokens
    tokens = {s: min(capacity, total - s * capacity) for s in range(count)}
    return script.step(tokens), script.num_blocks


def _prompt_lengths(block: int) -> list[int]:
    return [block + 1, 2 * block, 1, max(1, block - 1), 3 * block - 2, 2]


def verify_engine(
    root: Path,
    manifest: Manifest,
    step: StepGraph,
    read: ReadTensor,
    tolerance: float,
    stages: Stages,
) -> dict[str, float | None]:
    """Hold the staged engine below `root` to the reference, at each ISA level; None stands for
    one that this processor can't run. Leaves the steps in the engine, for `llmbuild verify`.

    Raises Divergence when logits differ by more than `tolerance`.
    """
    batches, num_blocks = make_batches(
        manifest.limits, manifest.kv, manifest.vocab_size, manifest.buckets
    )
    expected = run_reference(step, read, batches, manifest.kv, num_blocks, stages)
    save_steps(stored_steps(batches, expected, num_blocks, tolerance), root / STEPS_FILE)
    verified: dict[str, float | None] = dict.fromkeys(manifest.target.variants)
    for level in verified:
        if level in supported_levels():
            with stages.stage(f"verify {level}"):
                verified[level] = verify_level(root, manifest, level, expected, tolerance)
    return verified


def run_reference(
    step: StepGraph,
    read: ReadTensor,
    batches: Sequence[StepBatch],
    kv: KVLayout,
    num_blocks: int,
    stages: Stages,
) -> list[NDArray[np.float32]]:
    """The reference's logits of each step, on KV pools of this layout."""
    items = sum(weight_items(step, node) for node in step.graph)
    with (
        stages.stage("reference", shows_bars=True),
        stages.progress.task("running the reference", _FP32_BYTES * items) as advance,
    ):
        pools = _empty_pools(kv, num_blocks)
        return run_steps(step, read, batches, pools, lambda count: advance(_FP32_BYTES * count))


def _empty_pools(kv: KVLayout, num_blocks: int) -> list[LayerPools]:
    shape = (num_blocks, kv.num_kv_heads, kv.block_size, kv.head_dim)
    return [LayerPools.filled(shape, layer.k_dtypes, layer.v_dtypes) for layer in kv.layers]


def stored_steps(
    batches: list[StepBatch],
    logits: list[NDArray[np.float32]],
    num_blocks: int,
    tolerance: float,
) -> VerificationSteps:
    """What the engine carries of the verification: the steps, and logits at some columns."""
    vocab_size = logits[0].shape[1]
    columns = np.linspace(0, vocab_size - 1, min(vocab_size, MAX_STORED_COLUMNS)).astype(np.int64)
    kept = [rows[:, columns] for rows in logits]
    return VerificationSteps(batches, kept, columns, num_blocks, tolerance)


def verify_level(
    root: Path,
    manifest: Manifest,
    level: str,
    expected: Sequence[NDArray[np.float32]],
    tolerance: float,
) -> float:
    """Run the staged engine's steps at an ISA level, in a process of its own; returns the largest
    relative difference of its logits. Raises InternalError when it diverges or doesn't finish."""
    with tempfile.TemporaryDirectory() as scratch:
        out = Path(scratch) / "logits.npz"
        command = [sys.executable, "-m", "llmbuild.runtime.replay", str(root), level, str(out)]
        try:
            run = subprocess.run(
                command,
                input=msgspec.json.encode(manifest),
                capture_output=True,
                timeout=TIMEOUT_S,
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            raise InternalError(f"the {level} engine didn't finish in {TIMEOUT_S} s") from error
        if run.returncode != 0:
            last = run.stderr.decode(errors="replace").strip().splitlines()[-1:]
            raise InternalError(
                f"the {level} engine ended with status {run.returncode} on its verification "
                f"steps: {' '.join(last)}"
            )
        with np.load(out, allow_pickle=False) as file:
            got = [file[f"arr_{index}"] for index in range(len(expected))]
    worst = max(map(relative_difference, got, expected))
    require_within(tolerance, worst, f"{level} engine")
    return worst
