"""run_steps, the truth of a build, against the eager decoder; and what it reads and keeps."""

import weakref
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from llmbuild.builder.graph.pipeline import run_passes
from llmbuild.builder.graph.reference import run_steps
from llmbuild.builder.graph.step_graph import StepGraph
from llmbuild.builder.graph.trace import TORCH_DTYPES
from llmbuild.builder.models.config import DecoderConfig
from llmbuild.builder.models.decoder import Decoder
from llmbuild.plugins.common.kv_pools import LayerPools, bind_kv_pools
from llmbuild.runtime.batch import StepBatch

Tensors = dict[str, NDArray[np.generic]]


def relative_error(got: NDArray[np.float32], want: NDArray[np.float32]) -> float:
    return float(np.abs(got - want).max() / np.abs(want).max())


def test_steps_run_together_equal_the_eager_decoder_step_by_step(
    traced: Callable[..., StepGraph],
    decoder_config: Callable[..., DecoderConfig],
    random_tensors: Callable[[StepGraph], Tensors],
    empty_pools: Callable[..., list[LayerPools]],
    batches: list[StepBatch],
    variant: dict[str, Any],
) -> None:
    """Before the passes and after them."""
    step, fused = traced(**variant), traced(**variant)
    run_passes(fused)
    tensors = random_tensors(step)
    overrides = dict(variant)
    precision = overrides.pop("precision", "fp32")
    decoder = Decoder(decoder_config(**overrides), TORCH_DTYPES[precision])
    state = {name: torch.from_numpy(values) for name, values in (tensors | step.constants).items()}
    decoder.load_state_dict(state)
    eager_pools, eager = empty_pools(**variant), []
    for batch in batches:
        fields = ("token_ids", "positions", "query_start", "kv_lengths", "block_tables")
        arrays = (getattr(batch, name) for name in (*fields, "logit_rows"))
        with bind_kv_pools(eager_pools), torch.no_grad():
            eager.append(decoder(*map(torch.from_numpy, arrays)).numpy())
    # fp32's rounding through two layers; in bf16 a key may round to its neighbour.
    tolerance = {"fp32": 1e-5, "bf16": 1e-2}[precision]
    for graph in (step, fused):
        pools = empty_pools(**variant)
        got = run_steps(graph, tensors.__getitem__, batches, pools)
        for batch, logits, want in zip(batches, got, eager, strict=True):
            assert logits.dtype == np.float32
            assert logits.shape == (len(batch.logit_rows), 37)
            assert relative_error(logits, want) < tolerance
        assert_pools_equal(pools, eager_pools, tolerance)


def assert_pools_equal(got: list[LayerPools], expected: list[LayerPools], tolerance: float) -> None:
    for one, other in zip(got, expected, strict=True):
        for pool, want in ((one.k, other.k), (one.v, other.v)):
            assert torch.equal(pool.isnan(), want.isnan())  # the same slots were written
            torch.testing.assert_close(
                pool.float(), want.float(), rtol=tolerance, atol=tolerance, equal_nan=True
            )


@pytest.mark.parametrize("with_passes", [False, True])
def test_every_canonical_tensor_is_read_once(
    traced: Callable[..., StepGraph],
    random_tensors: Callable[[StepGraph], Tensors],
    empty_pools: Callable[..., list[LayerPools]],
    batches: list[StepBatch],
    with_passes: bool,
) -> None:
    variant = {"qk_norm": "head", "qkv_bias": True, "tie_embeddings": True}
    step, reads = traced(**variant), Counter[str]()
    tensors = random_tensors(step)
    if with_passes:
        run_passes(step)

    def read(name: str) -> NDArray[np.generic]:
        reads[name] += 1
        return tensors[name]

    run_steps(step, read, batches, empty_pools(**variant))
    assert reads == Counter(tensors.keys())


def test_a_weight_is_freed_before_the_next_node_reads_its_own(
    traced: Callable[..., StepGraph],
    random_tensors: Callable[[StepGraph], Tensors],
    empty_pools: Callable[..., list[LayerPools]],
    batches: list[StepBatch],
) -> None:
    variant = {"qk_norm": "head", "qkv_bias": True}
    step = traced(**variant)
    tensors = random_tensors(step)
    alive: set[str] = set()
    seen_together: set[frozenset[str]] = set()

    def read(name: str) -> NDArray[np.generic]:
        values = tensors[name].copy()
        seen_together.add(frozenset(alive))
        alive.add(name)
        weakref.finalize(values, alive.discard, name)
        return values

    run_steps(step, read, batches, empty_pools(**variant))
    projections = [
        f"layers.{layer}.attention.{name}_proj.weight" for layer in range(2) for name in "qkv"
    ]
    assert seen_together == {frozenset(), *(frozenset([name]) for name in projections)}
    assert alive == set()


def test_a_tied_embedding_stays_until_the_head_has_read_it(
    traced: Callable[..., StepGraph],
    random_tensors: Callable[[StepGraph], Tensors],
    empty_pools: Callable[..., list[LayerPools]],
    batches: list[StepBatch],
) -> None:
    step, alive = traced(tie_embeddings=True), set[str]()
    tensors = random_tensors(step)
    alive_at_last_read: list[set[str]] = []

    def read(name: str) -> NDArray[np.generic]:
        values = tensors[name].copy()
        alive_at_last_read[:] = [set(alive)]
        alive.add(name)
        weakref.finalize(values, alive.discard, name)
        return values

    run_steps(step, read, batches, empty_pools())
    assert alive_at_last_read == [{"embed.weight"}]
    assert alive == set()
