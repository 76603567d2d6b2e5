"""Calibration tokens as one step of the step graph."""

import numpy as np
from numpy.typing import NDArray

from llmbuild.builder.models.config import DecoderConfig
from llmbuild.plugins.common.kv_pools import LayerPools
from llmbuild.runtime.batch import StepBatch
from llmbuild.runtime.manifest import KVLayer, KVLayout


def calibration_batch(tokens: NDArray[np.int32], wanted: int | None = None) -> StepBatch:
    """Every sequence from its beginning in a block of its own.

    tokens: int32 [sequences, length], which is the KV block size, too; block s + 1 is sequence s's.
    wanted: how many of each sequence's tokens have their logits wanted, the last ones; None is all.
    """
    sequences, length = tokens.shape
    rows = np.arange(sequences * length, dtype=np.int32).reshape(sequences, length)
    return StepBatch(
        token_ids=tokens.reshape(-1),
        positions=np.tile(np.arange(length, dtype=np.int32), sequences),
        query_start=np.arange(sequences + 1, dtype=np.int32) * np.int32(length),
        kv_lengths=np.full(sequences, length, np.int32),
        block_tables=np.arange(1, sequences + 1, dtype=np.int32)[:, None],
        logit_rows=rows[:, length - (wanted or length) :].reshape(-1),
    )


def pools_of(kv: KVLayout, shape: tuple[int, ...]) -> list[LayerPools]:
    """Pools for a batch of [sequences, length] tokens; one for all layers of the same dtypes, since
    a walk through the model never comes back to a layer."""
    sequences, length = shape
    pool = (sequences + 1, kv.num_kv_heads, length, kv.head_dim)
    kinds = {layer.describe(): layer for layer in kv.layers}
    pools = {
        kind: LayerPools.filled(pool, layer.k_dtypes, layer.v_dtypes)
        for kind, layer in kinds.items()
    }
    return [pools[layer.describe()] for layer in kv.layers]


def fp32_pools(config: DecoderConfig, shape: tuple[int, ...]) -> list[LayerPools]:
    """Such pools, all in fp32."""
    dtypes = KVLayer.of_heads([("fp32", "fp32")] * config.num_kv_heads)
    kv = KVLayout(
        block_size=shape[1],
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        layers=[dtypes] * config.num_layers,
    )
    return pools_of(kv, shape)
