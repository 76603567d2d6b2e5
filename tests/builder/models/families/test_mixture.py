"""Routing at its edges, and what a token of a mixture of experts doesn't depend on."""

from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from llmbuild.runtime.batch import StepBatch
from llmbuild.runtime.engine import open_engine
from llmbuild.runtime.executors.cpu import CpuExecutor

SMALL_MOE = {
    "experts_implementation": "eager",
    "max_position_embeddings": 64,
    "moe_intermediate_size": 17,
    "num_hidden_layers": 4,
}


@pytest.fixture
def edges(hf_model: Callable[..., Any]) -> Callable[..., Any]:
    """edges(num_experts, top_k): a Qwen3-MoE whose layers' routers have, in turn, nothing but
    zeros; several equal rows; all rows equal; and a last expert that no token is sent to.

    A row that is equal to another has one element alone, so that rounding can't part the two.
    """

    def build(num_experts: int, top_k: int) -> Any:
        saved = hf_model(
            "qwen3_moe", **SMALL_MOE, num_experts=num_experts, num_experts_per_tok=top_k
        )
        zeros, several, equal, unused = (
            layer.mlp.gate.weight.data for layer in saved.model.model.layers
        )
        zeros.zero_()
        for router, rows in ((several, slice(1, None, 2)), (equal, slice(None))):
            router[rows] = 0
            router[rows, 3] = 2
        # The largest of v.x and -v.x is above 0, and so are as many pairs as needed.
        for pair in range(num_experts // 2):
            unused[2 * pair] = -unused[2 * pair + 1]
        unused[-1] = 0
        saved.model.save_pretrained(saved.path)
        return saved

    return build


def _chosen(model: Any, layer: int, tokens: Sequence[int]) -> list[list[int]]:
    """The experts, by transformers, of every token in a layer."""
    seen: list[torch.Tensor] = []
    gate = model.model.layers[layer].mlp.gate
    hook = gate.register_forward_hook(lambda _, __, out: seen.append(out[2]))
    with torch.no_grad():
        model(torch.tensor([list(tokens)]))
    hook.remove()
    return seen[0].tolist()


# nth_element and sort choose the experts of all but the last, for which it is partial_sort.
@pytest.mark.parametrize(("num_experts", "top_k"), [(7, 3), (8, 2), (64, 8), (67, 1)])
def test_ties_and_experts_without_tokens_are_routed_as_by_transformers(
    edges: Callable[..., Any],
    assert_decoder_matches: Callable[..., None],
    num_experts: int,
    top_k: int,
) -> None:
    saved = edges(num_experts, top_k)
    tokens = np.random.default_rng(3).integers(1, 97, 20).tolist()
    for layer in (0, 2):  # ties alone: every token has the same experts
        assert len({tuple(sorted(experts)) for experts in _chosen(saved.model, layer, tokens)}) == 1
    if top_k <= num_experts // 2:
        used = {expert for experts in _chosen(saved.model, 3, tokens) for expert in experts}
        assert num_experts - 1 not in used
    assert_decoder_matches(saved)


@pytest.mark.parametrize(
    ("num_experts", "top_k"),
    [
        (7, 3),
        pytest.param(8, 2, marks=pytest.mark.slow),
        pytest.param(64, 8, marks=pytest.mark.slow),
        (67, 1),
    ],
)
def test_engine_routes_ties_and_experts_without_tokens_as_transformers(
    edges: Callable[..., Any],
    assert_engine_matches: Callable[..., None],
    num_experts: int,
    top_k: int,
) -> None:
    assert_engine_matches(edges(num_experts, top_k))


def _step(sequences: Sequence[tuple[list[int], int, int, list[int]]]) -> StepBatch:
    """One step over (tokens, start, stop, block table) of each sequence, all logits wanted."""
    counts = [stop - start for _, start, stop, _ in sequences]
    new = [tokens[start:stop] for tokens, start, stop, _ in sequences]
    return StepBatch(
        token_ids=np.concatenate(new).astype(np.int32),
        positions=np.concatenate([np.arange(s, e) for _, s, e, _ in sequences]).astype(np.int32),
        query_start=np.cumsum([0, *counts]).astype(np.int32),
        kv_lengths=np.array([stop for _, _, stop, _ in sequences], np.int32),
        block_tables=np.array([table for *_, table in sequences], np.int32),
        logit_rows=np.arange(sum(counts), dtype=np.int32),
    )


def test_a_sequence_gets_the_same_bits_alone_and_among_others(
    hf_model: Callable[..., Any], compile_engine: Callable[..., Path]
) -> None:
    """So for prefill, a chunk, and decode, whatever the others' experts and the threads."""
    sizes = {"num_experts": 7, "num_experts_per_tok": 3, "shared_expert_intermediate_size": 23}
    saved = hf_model("qwen2_moe", **SMALL_MOE, **sizes)
    engine = open_engine(compile_engine(saved))
    rng = np.random.default_rng(5)
    tokens = [rng.integers(1, 97, 12).tolist() for _ in range(3)]
    tables = [[3, 8, 1], [7, 2, 9], [4, 6, 5]]
    spans = [(0, 5), (5, 11), (11, 12)]
    alone: list[np.ndarray] = []
    with closing(CpuExecutor(engine, num_blocks=10, num_threads=1)) as executor:
        for start, stop in spans:
            alone.append(executor.step(_step([(tokens[1], start, stop, tables[1])])).copy())
    for num_threads in (1, 2):
        with closing(CpuExecutor(engine, num_blocks=10, num_threads=num_threads)) as executor:
            for expected, (start, stop) in zip(alone, spans, strict=True):
                among = [
                    (tokens[0], start, stop, tables[0]),
                    (tokens[1], start, stop, tables[1]),
                    (tokens[2], start, stop, tables[2]),
                ]
                logits = executor.step(_step(among))
                count = stop - start
                np.testing.assert_array_equal(logits[count : 2 * count], expected)
