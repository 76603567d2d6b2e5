"""The last layer computes the wanted rows alone; they are what it would make of all rows."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from llmbuild.builder.graph.trace import TORCH_DTYPES
from llmbuild.builder.models.canonical import expected_tensors
from llmbuild.builder.models.config import DecoderConfig, MoeConfig
from llmbuild.builder.models.decoder import Decoder
from llmbuild.builder.models.rope import inverse_frequencies
from llmbuild.plugins.common.kv_pools import LayerPools, bind_kv_pools
from llmbuild.runtime.batch import StepBatch

TOLERANCE = 1e-5  # of the largest logit: fewer rows may be summed up in another order


@pytest.fixture
def decoder_of(decoder_config: Callable[..., DecoderConfig]) -> Callable[..., Decoder]:
    """decoder_of(precision="fp32", **overrides): a decoder with random weights, norms near 1."""

    def build(precision: str = "fp32", **overrides: Any) -> Decoder:
        config, rng = decoder_config(**overrides), np.random.default_rng(11)
        state = {}
        for name, shape in expected_tensors(config).items():
            values = rng.standard_normal(shape, np.float32)
            values *= 1.5 * shape[-1] ** -0.5 if len(shape) > 1 else 0.3
            state[name] = torch.from_numpy(values + float(name.endswith("norm.weight")))
        for index, rope in enumerate(config.ropes):
            if rope.kind != "dynamic":
                state[f"ropes.{index}.inv_freq"] = torch.from_numpy(inverse_frequencies(rope))
        decoder = Decoder(config, TORCH_DTYPES[precision])
        decoder.load_state_dict(state)
        return decoder

    return build


def run(
    decoder: Decoder, batch: StepBatch, wanted: NDArray[np.int32], pools: list[LayerPools]
) -> NDArray[np.float32]:
    names = ("token_ids", "positions", "query_start", "kv_lengths", "block_tables")
    arrays = [*(getattr(batch, name) for name in names), wanted]
    with bind_kv_pools(pools), torch.no_grad():
        return decoder(*map(torch.from_numpy, arrays)).numpy()


@pytest.fixture
def check(
    decoder_of: Callable[..., Decoder],
    empty_pools: Callable[..., list[LayerPools]],
    batches: list[StepBatch],
) -> Callable[..., None]:
    """check(**variant): wanted rows, in any order and any times, have the logits that they have
    among all; and every token's K and V are in the pools all the same."""

    def run_both(**variant: Any) -> None:
        decoder = decoder_of(**variant)
        pools, pools_of_all = empty_pools(**variant), empty_pools(**variant)
        for batch in batches:
            count = len(batch.token_ids)
            wanted = np.array([count - 1, *batch.logit_rows, 0, 0], np.int32)
            got = run(decoder, batch, wanted, pools)
            of_all = run(decoder, batch, np.arange(count, dtype=np.int32), pools_of_all)
            assert got.shape == (len(wanted), 37)
            assert np.abs(got - of_all[wanted]).max() <= TOLERANCE * np.abs(of_all).max()
        for one, other in zip(pools, pools_of_all, strict=True):
            for pool, expected in ((one.k, other.k), (one.v, other.v)):
                torch.testing.assert_close(pool, expected, rtol=0, atol=0, equal_nan=True)

    return run_both


def test_wanted_rows_have_the_logits_that_they_have_among_all(
    check: Callable[..., None], variant: dict[str, Any]
) -> None:
    check(**variant)


@pytest.mark.parametrize("shared_size", [0, 6])
def test_experts_of_the_last_layer_are_chosen_for_the_wanted_rows(
    check: Callable[..., None], shared_size: int
) -> None:
    moe = MoeConfig(5, 2, 7, normalise=True, shared_size=shared_size, shared_gate=shared_size > 0)
    check(moe=moe, moe_layers=(False, True))
