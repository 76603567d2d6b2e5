"""The plugin of rope_kv_write, launched as TensorRT would, against the torch reference: pools are
known by their addresses."""

import numpy as np
import pytest
import torch
from kernel_harness import make_step
from plugin_contract import run
from triton_harness import GPU_ROUNDERS, GpuPool, pad_step, step_tensors

from llmbuild.plugins.common.attention_variant import AttentionShape
from llmbuild.plugins.common.kv_pools import LayerPools, bind_kv_pools
from llmbuild.plugins.rope_kv_write.op import rope_kv_write as reference
from llmbuild.plugins.rope_kv_write.tensorrt import rope_kv_write

SHAPE = AttentionShape(num_heads=2, num_kv_heads=1, head_dim=24, block_size=3)
EPS = 1e-5

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


def addresses(pool: GpuPool, of: str) -> dict[str, torch.Tensor]:
    tensors = pool.arguments(of)
    return {
        name: torch.tensor([tensor.data_ptr()])
        for name, tensor in tensors.items()
        if tensor is not None
    }


@pytest.mark.parametrize("tokens", [1, 4, 5])  # of a program: 4
@pytest.mark.parametrize(
    ("kv_dtypes", "has_norms", "has_scales"),
    [(("fp16", "int8"), True, False), (("int8-static", "int4"), False, True)],
)
def test_pools_are_written_at_their_addresses(
    kv_dtypes: tuple[str, str], has_norms: bool, has_scales: bool, tokens: int
) -> None:
    rng = np.random.default_rng(tokens)
    step, num_blocks = make_step([(2, 1), (0, tokens - 1)] if tokens > 1 else [(2, 1)], 3, rng)
    d, pool_shape = SHAPE.head_dim, (num_blocks, SHAPE.num_kv_heads, 3, SHAPE.head_dim)
    k_pool, v_pool = (GpuPool.random(dtype, pool_shape, rng) for dtype in kv_dtypes)

    def numbers(*shape: int) -> torch.Tensor:
        return torch.from_numpy(rng.standard_normal(shape)).float()

    rows = tokens + 1  # the last is padding
    q, k, v = (numbers(rows, heads * d).half() for heads in (2, 1, 1))
    table = numbers(rows, d - 8)
    norms = [numbers(d) if has_norms else None for _ in range(2)]
    scales = [numbers(d).exp() / 9 if has_scales else None for _ in range(2)]
    pools = LayerPools(k_pool.elements, v_pool.elements, [""], [""])
    real = step_tensors(step)
    del real["kv_lengths"]
    dtypes = [[dtype] for dtype in kv_dtypes]
    pools = LayerPools(k_pool.elements, v_pool.elements, *dtypes)
    with bind_kv_pools([pools]), pytest.MonkeyPatch.context() as patch:
        patch.setattr("llmbuild.plugins.common.kv_pools.ROUNDERS", GPU_ROUNDERS)
        live = (x[:tokens].float() for x in (q, k, v, table))
        expected, _ = reference(*live, *norms, *real.values(), 0, EPS, *scales)
    padded = step_tensors(pad_step(step, sequences=1))
    del padded["kv_lengths"]
    padded["positions"] = torch.nn.functional.pad(padded["positions"], (0, 1))
    plugin = rope_kv_write(
        80,
        SHAPE,
        "fp16",
        kv_dtypes,
        rotary_dim=d - 8,
        eps=EPS if has_norms else None,
        has_channel_scales=has_scales,
    )
    q_out, token = run(
        plugin,
        q=q,
        k=k,
        v=v,
        table=table,
        q_norm=norms[0],
        k_norm=norms[1],
        **padded,
        k_channel_scale=scales[0],
        v_channel_scale=scales[1],
        **addresses(k_pool, "k"),
        **addresses(v_pool, "v"),
    )
    assert token.tolist() == [0]
    torch.testing.assert_close(q_out[:tokens].float(), expected, atol=4e-3, rtol=4e-3)
    assert q_out[tokens:].isnan().all()
    for pool, target in ((k_pool, pools.k), (v_pool, pools.v)):
        torch.testing.assert_close(pool.elements, target, atol=2e-3, rtol=2e-3)
