"""The networks of ranks that share layers, emulated together, against the whole model's."""

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
from network_models import RandomTensors
from numpy.typing import NDArray

from llmbuild.builder.models.config import DecoderConfig
from llmbuild.builder.shard.graphs import RankGraph, rank_graphs
from llmbuild.builder.targets.tensorrt.emulation.emulate import emulate
from llmbuild.builder.targets.tensorrt.limits import Limits, cache_name
from llmbuild.quant.plan import QuantPlan
from llmbuild.quant.reader import PlannedReader
from llmbuild.runtime.manifest import KVLayout, Parallel

LIMITS = Limits(batch=1, chunk=5, capacity=8)
TOKENS = np.array([[38, 0, 12, 13, 26]], np.int32)  # the first and last of each of three ranks


class Exchange:
    """Sums what all ranks bring."""

    def __init__(self, count: int) -> None:
        self.parts: list[Any] = [None] * count
        self.barrier = threading.Barrier(count, timeout=60)

    def of(self, rank: int) -> Callable[[NDArray[Any]], NDArray[Any]]:
        def total(x: NDArray[Any]) -> NDArray[Any]:
            self.parts[rank] = x
            self.barrier.wait()
            summed = np.sum(self.parts, axis=0)
            self.barrier.wait()
            return summed

        return total


def feeds(config: DecoderConfig) -> dict[str, NDArray[Any]]:
    shape = (1, config.num_kv_heads, LIMITS.capacity, config.head_dim)
    caches = {
        cache_name(layer, kind): np.zeros(shape, np.float16)
        for layer in range(config.num_layers)
        for kind in "kv"
    }
    return caches | {
        "token_ids": TOKENS,
        "positions": np.arange(5, dtype=np.int32)[None],
        "kv_lengths": np.array([5], np.int32),
        "write_indices": np.array([0], np.int32),
        "logit_rows": np.array([2, 4], np.int32),
    }


def logits_of(graphs: list[RankGraph]) -> NDArray[np.float32]:
    """All ranks' logits, side by side."""
    exchange, results = Exchange(len(graphs)), [np.empty(0)] * len(graphs)

    def work(rank: int, graph: RankGraph) -> None:
        total = exchange.of(rank)
        network = emulate(graph.step, graph.config, LIMITS, "fp16", graph.read, total)
        results[rank] = network.run(feeds(graph.config))["logits"]

    threads = [
        threading.Thread(target=work, args=(rank, graph)) for rank, graph in enumerate(graphs)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return np.concatenate(results, axis=1)


def test_three_ranks_give_the_whole_models_logits(
    decoder_config: Callable[..., DecoderConfig], kv_layout: Callable[..., KVLayout]
) -> None:
    config = decoder_config(num_kv_heads=3, intermediate_size=21, vocab_size=39, mlp_bias=True)
    reader = PlannedReader(RandomTensors(config), QuantPlan())
    one, three = (
        logits_of(
            rank_graphs(
                Parallel(tp=tp, pp=1), config, "fp32", QuantPlan(), kv_layout(config), {}, reader
            )
        )
        for tp in (1, 3)
    )
    assert one.shape == three.shape == (2, 39)
    assert np.abs(three - one).max() < 0.01 * np.abs(one).max()
