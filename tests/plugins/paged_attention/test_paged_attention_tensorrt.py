"""The plugins of paged_attention, launched as TensorRT would, one after the other, against the
torch reference: sequences with one token among others."""

from typing import Any

import numpy as np
import pytest
import torch
from plugin_contract import run
from triton_harness import GpuPool, pad_step, random_pools, step_tensors

from llmbuild.plugins.common.attention_variant import AttentionShape
from llmbuild.plugins.common.kv_pools import LayerPools, bind_kv_pools
from llmbuild.plugins.paged_attention.op import paged_attention as reference
from llmbuild.plugins.paged_attention.tensorrt import decode, prefill, splits_of
from llmbuild.plugins.paged_attention.triton import AttentionType

SHAPE = AttentionShape(num_heads=6, num_kv_heads=2, head_dim=24, block_size=5)
MIXED = [(0, 1), (3, 9), (70, 1), (0, 23), (4, 1)]  # (computed, new); tiles have 21 tokens
OPTIONS: dict[str, tuple[tuple[str, str], dict[str, Any]]] = {
    "plain": (("fp16", "fp16"), {}),
    "window and cap": (("int8", "int4"), {"window": 7, "soft_cap": 3.0}),
    "sinks and channel scales": (
        ("int8-static", "int8-static"),
        {"has_sinks": True, "has_channel_scales": True},
    ),
}

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


def addresses(pool: GpuPool, of: str) -> dict[str, torch.Tensor]:
    tensors = pool.arguments(of)
    return {
        name: torch.tensor([tensor.data_ptr()])
        for name, tensor in tensors.items()
        if tensor is not None
    }


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize(
    ("sequences", "padding", "splits"),
    [([(16, 1)], 0, 1), ([(2, 43)], 0, 1), (MIXED, 2, 4)],
    ids=("one token", "three tiles", "a mix"),
)
def test_any_mix_of_sequences_equals_the_reference(
    sequences: list[tuple[int, int]], padding: int, splits: int, options: str
) -> None:
    kv_dtypes, chosen = OPTIONS[options]
    of = AttentionType(SHAPE, "fp16", *kv_dtypes, scale=0.3, **chosen)
    rng = np.random.default_rng(len(sequences))
    h, hkv, d = SHAPE.num_heads, SHAPE.num_kv_heads, SHAPE.head_dim
    step, k_pool, v_pool = random_pools(sequences, kv_dtypes, hkv, d, SHAPE.block_size, rng)
    tokens = len(step.positions)
    q = torch.from_numpy(rng.standard_normal((tokens + padding, h * d))).half()
    scales: list[torch.Tensor | None] = [None, None]
    if of.has_channel_scales:
        scales = [torch.from_numpy(rng.uniform(0.01, 0.05, hkv * d)).float() for _ in range(2)]
    sinks = torch.linspace(-3, 3, h) if of.has_sinks else None
    with bind_kv_pools([LayerPools(k_pool.elements, v_pool.elements)]):
        expected = reference(
            q[:tokens].float(),
            torch.zeros(1, dtype=torch.int32),
            *step_tensors(step).values(),
            sinks,
            0,
            of.scale,
            of.window,
            of.soft_cap,
            *scales,
        )
    read = step_tensors(pad_step(step, sequences=padding))
    del read["positions"]
    read |= {"q": q, **addresses(k_pool, "k"), **addresses(v_pool, "v")}
    read |= {} if scales[0] is None else {"k_channel_scale": scales[0]}
    token = torch.zeros(1, dtype=torch.int32)
    partial_out, partial_stats = run(decode(80, of, splits), token=token, **read)
    is_decoded = [new == 1 for _, new in sequences] + [False] * padding
    assert (~partial_stats.isnan().flatten(1).any(1)).tolist() == is_decoded
    (out,) = run(
        prefill(80, of, splits),
        **read,
        partial_out=partial_out,
        partial_stats=partial_stats,
        sinks=sinks,
        v_channel_scale=scales[1],
    )
    error = (out[:tokens].float() - expected).abs().max()
    assert error < 4e-3 * expected.abs().max()
    assert out[tokens:].isnan().all()


@pytest.mark.parametrize(
    ("capacity", "splits"), [(1, 1), (256, 1), (257, 2), (2048, 8), (2049, 16), (10**6, 32)]
)
def test_long_contexts_are_read_in_more_splits(capacity: int, splits: int) -> None:
    assert splits_of(capacity) == splits
