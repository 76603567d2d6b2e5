"""The ranks' step graphs, run together in torch, against the whole model's."""

import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from llmbuild.builder.graph.passes.verify import collectives
from llmbuild.builder.graph.pipeline import run_passes
from llmbuild.builder.graph.reference import run_steps, running
from llmbuild.builder.graph.trace import trace
from llmbuild.builder.models.canonical import expected_tensors
from llmbuild.builder.models.config import DecoderConfig, MoeConfig, NormConfig
from llmbuild.builder.shard.graphs import RankGraph, rank_graphs
from llmbuild.plugins.all_reduce.op import bind_all_reduce
from llmbuild.plugins.common.kv_pools import LayerPools, bind_kv_pools
from llmbuild.quant.grid import QuantisedMatrix
from llmbuild.quant.plan import QuantPlan
from llmbuild.quant.reader import PlannedReader
from llmbuild.runtime.batch import StepBatch
from llmbuild.runtime.manifest import KVLayout, Parallel


class Tensors:
    """Random tensors of a config."""

    def __init__(self, config: DecoderConfig) -> None:
        rng = np.random.default_rng(11)
        self.values = {
            name: (rng.standard_normal(shape) * 0.2).astype(np.float32)
            for name, shape in expected_tensors(config).items()
        }

    def shape(self, name: str) -> tuple[int, ...]:
        return self.values[name].shape

    def has_rows(self, name: str) -> bool:
        return True

    def read(self, name: str) -> NDArray[np.float32]:
        return self.values[name]

    def read_rows(self, name: str, begin: int, end: int) -> NDArray[np.float32]:
        return self.values[name][begin:end]

    def stored_grid(self, name: str) -> None:
        return None

    def read_codes(self, name: str, rows: tuple[int, int] | None = None) -> QuantisedMatrix:
        raise AssertionError(f"{name} isn't quantised")


class Exchange:
    """Sums what all threads of a group bring, in the order of their ranks."""

    def __init__(self, count: int) -> None:
        self.parts: list[Any] = [None] * count
        self.barrier = threading.Barrier(count, timeout=60)

    def of(self, rank: int) -> Callable[[torch.Tensor], torch.Tensor]:
        def total(x: torch.Tensor) -> torch.Tensor:
            self.parts[rank] = x
            self.barrier.wait()
            summed = torch.stack(self.parts).sum(0)
            self.barrier.wait()
            return summed

        return total


def run_ranks(graphs: Sequence[RankGraph], batch: StepBatch) -> NDArray[np.float32]:
    """The logits that all ranks make together: stage after stage, a stage's ranks in threads."""
    tp = graphs[0].shard.parallel.tp
    hidden: torch.Tensor | None = None
    for first in range(0, len(graphs), tp):
        exchange, results = Exchange(tp), [torch.empty(0)] * tp

        def work(
            rank: int,
            graph: RankGraph,
            hidden: torch.Tensor | None = hidden,
            exchange: Exchange = exchange,
            results: list[torch.Tensor] = results,
        ) -> None:
            shape = (9, graph.kv.num_kv_heads, graph.kv.block_size, graph.kv.head_dim)
            pools = [LayerPools.filled(shape, x.k_dtypes, x.v_dtypes) for x in graph.kv.layers]
            with bind_kv_pools(pools), bind_all_reduce(exchange.of(rank)), torch.no_grad():
                for _, values in running(graph.step, graph.read, batch, hidden):
                    last = values
            results[rank] = last[graph.step.graph.outputs[0]]

        threads = [
            threading.Thread(target=work, args=(rank, graph))
            for rank, graph in enumerate(graphs[first : first + tp])
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        hidden = results[0]
    return torch.cat(results, dim=1).numpy()


def batch(vocab_size: int) -> StepBatch:
    """Three sequences of 5, 1 and 3 tokens."""
    lengths = [5, 1, 3]
    ends = np.cumsum(lengths)
    return StepBatch(
        token_ids=np.random.default_rng(5).integers(0, vocab_size, ends[-1]).astype(np.int32),
        positions=np.concatenate([np.arange(n) for n in lengths]).astype(np.int32),
        query_start=np.array([0, *ends], np.int32),
        kv_lengths=np.array(lengths, np.int32),
        block_tables=np.array([[3, 1], [2, 0], [5, 0]], np.int32),
        logit_rows=np.array([4, 5, 7, 8], np.int32),
    )


CASES = {
    "uneven heads": ({"num_heads": 9, "num_kv_heads": 3}, 2, 1),
    "a KV head each": ({"num_heads": 9, "num_kv_heads": 3}, 3, 1),
    "KV heads on several ranks": ({"num_heads": 9, "num_kv_heads": 3}, 5, 1),
    "one KV head on all": ({"num_heads": 5, "num_kv_heads": 1}, 4, 1),
    "two KV heads on three": ({"num_heads": 6, "num_kv_heads": 2}, 3, 1),
    "two stages": ({}, 1, 2),
    "ranks and stages": ({"num_heads": 9, "num_kv_heads": 3}, 3, 2),
    "tied embeddings": ({"tie_embeddings": True}, 2, 2),
    "biases": ({"qkv_bias": True, "o_bias": True, "mlp_bias": True, "head_bias": True}, 2, 1),
    "LayerNorm with learned positions": (
        {
            "norm": NormConfig(1e-5, kind="layer", bias=True),
            "learned_positions": True,
            "layer_ropes": (-1, -1),
            "ropes": (),
            "gated_mlp": False,
        },
        *(2, 2),
    ),
    "parallel residual": ({"parallel_residual": True, "shared_norm": True}, 2, 1),
    "norms after": ({"post_norm": True}, 2, 1),
    "norms of heads and sinks": ({"qk_norm": "head", "attention_sinks": True}, 2, 1),
    "soft caps": ({"logit_soft_cap": 3.0, "attention_soft_cap": 5.0, "embed_scale": 2.0}, 2, 2),
    "experts": (
        {
            "moe": MoeConfig(5, 2, 7, shared_size=6, shared_gate=True),
            "moe_layers": (True, False),
        },
        *(2, 1),
    ),
}


# Of the others each has something that one of these has, too.
QUICK = ("KV heads on several ranks", "soft caps", "experts")


@pytest.mark.parametrize(
    "case", [pytest.param(c, marks=() if c in QUICK else pytest.mark.slow) for c in CASES]
)
def test_ranks_together_give_the_whole_models_logits(
    case: str,
    decoder_config: Callable[..., DecoderConfig],
    kv_layout: Callable[..., KVLayout],
) -> None:
    overrides, tp, pp = CASES[case]
    config = decoder_config(**overrides)
    kv = kv_layout(config)
    read = PlannedReader(Tensors(config), QuantPlan())
    whole = trace(config, "fp32")
    run_passes(whole)
    step = batch(config.vocab_size)
    shape = (9, kv.num_kv_heads, kv.block_size, kv.head_dim)
    pools = [LayerPools.filled(shape, x.k_dtypes, x.v_dtypes) for x in kv.layers]
    (wanted,) = run_steps(whole, read, [step], pools)
    graphs = rank_graphs(Parallel(tp=tp, pp=pp), config, "fp32", QuantPlan(), kv, {}, read)
    got = run_ranks(graphs, step)
    assert np.abs(wanted).max() > 0.1
    np.testing.assert_allclose(got, wanted, rtol=0, atol=1e-5 * np.abs(wanted).max())


def test_a_layer_waits_twice_for_other_ranks_and_once_where_its_parts_are_parallel(
    decoder_config: Callable[..., DecoderConfig], kv_layout: Callable[..., KVLayout]
) -> None:
    for overrides, count in (({}, 5), ({"parallel_residual": True, "shared_norm": True}, 3)):
        config = decoder_config(**overrides)
        read = PlannedReader(Tensors(config), QuantPlan())
        parallel = Parallel(tp=2, pp=1)
        graphs = rank_graphs(parallel, config, "fp32", QuantPlan(), kv_layout(config), {}, read)
        assert [len(collectives(graph.step)) for graph in graphs] == [count, count]
