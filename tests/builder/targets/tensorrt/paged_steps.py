"""Steps of several sequences over paged KV pools, for an emulated network and the reference."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

sys.path.append(str(Path(__file__).parents[3] / "plugins"))  # for triton_harness

from network_models import Model
from triton_harness import GpuPool

from llmbuild.builder.graph.reference import run_steps
from llmbuild.builder.targets.tensorrt.emulation.emulate import Emulated
from llmbuild.builder.targets.tensorrt.paged_limits import PagedLimits
from llmbuild.plugins.common.kv_pools import LayerPools
from llmbuild.runtime.batch import StepBatch
from llmbuild.runtime.manifest import KVLayer, KVLayout, pool_name

BLOCK_SIZE, BLOCKS = 4, 5  # of a sequence
SEQUENCES = 3


def paged_limits(model: Model, k_dtype: str, v_dtype: str, sm: int = 80) -> PagedLimits:
    config = model.config
    layer = KVLayer.of_heads([(k_dtype, v_dtype)] * config.num_kv_heads)
    kv = KVLayout(
        block_size=BLOCK_SIZE,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        layers=[layer] * config.num_layers,
    )
    return PagedLimits(sequences=SEQUENCES + 1, tokens=24, blocks=BLOCKS, kv=kv, sm=sm)


@dataclass
class Sequences:
    """Prompts and what was made of them so far. tables: physical blocks, shuffled."""

    prompts: Sequence[Sequence[int]]
    made: list[list[int]] = field(default_factory=list)
    computed: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.made = [[] for _ in self.prompts]
        self.computed = [0 for _ in self.prompts]
        blocks = np.random.default_rng(5).permutation(len(self.prompts) * BLOCKS) + 1
        self.tables = blocks.reshape(-1, BLOCKS).astype(np.int32)

    @property
    def num_blocks(self) -> int:
        return self.tables.size + 1

    def batch(self, counts: dict[int, int]) -> StepBatch:
        """A step with so many tokens of some sequences; the logits of each one's last."""
        tokens, positions, starts, lengths = [], [], [0], []
        for sequence, count in counts.items():
            begin = self.computed[sequence]
            all_tokens = [*self.prompts[sequence], *self.made[sequence]]
            tokens += all_tokens[begin : begin + count]
            positions += range(begin, begin + count)
            starts.append(len(tokens))
            lengths.append(begin + count)
        return StepBatch(
            token_ids=np.array(tokens, np.int32),
            positions=np.array(positions, np.int32),
            query_start=np.array(starts, np.int32),
            kv_lengths=np.array(lengths, np.int32),
            block_tables=self.tables[list(counts)],
            logit_rows=np.array(starts[1:], np.int32) - 1,
        )

    def advance(self, counts: dict[int, int], logits: NDArray[np.float32]) -> None:
        """Takes the likeliest token of each sequence whose prompt is done."""
        for (sequence, count), row in zip(counts.items(), logits, strict=True):
            self.computed[sequence] += count
            if self.computed[sequence] >= len(self.prompts[sequence]):
                self.made[sequence].append(int(row.argmax()))


class Reference:
    """The step graph in torch, whose pools keep what the dtypes keep; fp16 as it is."""

    def __init__(self, model: Model, limits: PagedLimits, num_blocks: int) -> None:
        config = model.config
        shape = (num_blocks, config.num_kv_heads, BLOCK_SIZE, config.head_dim)
        self._model = model
        self._pools = []
        for layer in limits.kv.layers:
            dtypes = (
                ["fp32" if dtype == "fp16" else dtype for dtype in each]
                for each in (layer.k_dtypes, layer.v_dtypes)
            )
            self._pools.append(LayerPools.filled(shape, *dtypes))

    def logits(self, batch: StepBatch) -> NDArray[np.float32]:
        (logits,) = run_steps(self._model.step, self._model.read, [batch], self._pools)
        return logits


class Network:
    """An emulated network and its pools, full of numbers at first."""

    def __init__(self, model: Model, limits: PagedLimits, num_blocks: int, emulated: Emulated):
        config = model.config
        shape = (num_blocks, config.num_kv_heads, BLOCK_SIZE, config.head_dim)
        rng = np.random.default_rng(17)
        self._emulated = emulated
        self._pools = [
            {
                of: GpuPool.random(dtypes[0], shape, rng)
                for of, dtypes in (("k", layer.k_dtypes), ("v", layer.v_dtypes))
            }
            for layer in limits.kv.layers
        ]

    def logits(self, batch: StepBatch) -> NDArray[np.float32]:
        """Of the step, padded to more tokens and sequences."""
        return self._emulated.run(self.feeds(padded(batch)))["logits"][: batch.num_logit_rows]

    def feeds(self, batch: StepBatch) -> dict[str, NDArray[Any]]:
        names = self._emulated.network.inputs
        feeds = {name: getattr(batch, name) for name in names if not name.startswith("pool.")}
        for layer, pools in enumerate(self._pools):
            for of, pool in pools.items():
                for name, tensor in pool.arguments(of).items():
                    if tensor is not None:
                        feeds[pool_name(layer, name)] = _address(tensor)
        return feeds


def _address(tensor: torch.Tensor) -> NDArray[np.int64]:
    assert tensor.data_ptr() % 16 == 0
    return np.array([tensor.data_ptr()], np.int64)


def padded(batch: StepBatch) -> StepBatch:
    """A token more where their number is odd, a sequence without tokens, and a row of logits."""
    more = batch.num_tokens % 2
    return StepBatch(
        token_ids=np.pad(batch.token_ids, (0, more)),
        positions=np.pad(batch.positions, (0, more)),
        query_start=np.pad(batch.query_start, (0, 1), mode="edge"),
        kv_lengths=np.pad(batch.kv_lengths, (0, 1)),
        block_tables=np.pad(batch.block_tables, ((0, 1), (0, 0))),
        logit_rows=np.pad(batch.logit_rows, (0, 1)),
    )
