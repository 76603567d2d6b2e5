"""The Triton kernel of rope_kv_write, interpreted, against the torch reference."""

from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from kernel_harness import Step
from triton_harness import (
    FP8_LARGEST,
    GPU_ROUNDERS,
    KV_DTYPES,
    GpuPool,
    launch,
    pad_step,
    random_pools,
    raw_bytes,
    step_tensors,
    triton,
)

from llmbuild.plugins.common.attention_variant import AttentionShape
from llmbuild.plugins.common.kernel_variant import JitFunction, KernelVariant
from llmbuild.plugins.common.kv_pools import LayerPools, bind_kv_pools
from llmbuild.plugins.rope_kv_write.op import rope_kv_write as reference
from llmbuild.plugins.rope_kv_write.triton import rope_kv_write, variant

# (H, Hkv, D, block size, R): all or some of a head turns.
SHAPES = [(3, 1, 64, 16, 64), (4, 2, 32, 4, 10), (2, 2, 80, 5, 80), (3, 1, 96, 3, 48)]
SEQUENCES = [(0, 1), (0, 5), (7, 1), (3, 9), (15, 1)]
PADDING_ROWS = 3
TOKENS = 4  # of a program
EPS = 1e-5

Shape = tuple[int, int, int, int, int]

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, where a row has none


@dataclass
class Case:
    shape: Shape
    kv_dtypes: tuple[str, str]
    activation: torch.dtype = torch.float32
    sequences: list[tuple[int, int]] = field(default_factory=lambda: SEQUENCES)
    has_table: bool = True
    has_norms: bool = False
    has_channel_scales: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        h, hkv, d, block_size, rotary_dim = self.shape
        rng = np.random.default_rng(self.seed)

        def numbers(*shape: int) -> torch.Tensor:
            return torch.from_numpy(rng.standard_normal(shape)).float()

        step, self.k_pool, self.v_pool = random_pools(
            self.sequences, self.kv_dtypes, hkv, d, block_size, rng
        )
        self.step: Step = pad_step(step, sequences=2)
        rows = len(step.positions) + PADDING_ROWS
        self.q = numbers(rows, h * d).to(self.activation)
        self.k, self.v = (3 * numbers(2, rows, hkv * d)).to(self.activation)
        self.table = numbers(rows, rotary_dim) if self.has_table else None
        self.norms = [numbers(d) if self.has_norms else None for _ in range(2)]
        self.scales = [numbers(hkv * d).exp() / 9 for _ in range(2)]
        if not self.has_channel_scales:
            self.scales = [None, None]

    def run(
        self, kernel: JitFunction | KernelVariant = rope_kv_write
    ) -> tuple[torch.Tensor, GpuPool, GpuPool]:
        """Q, and the pools afterwards."""
        h, hkv, d, block_size, rotary_dim = self.shape
        padding = np.full(PADDING_ROWS, 1, np.int32)
        step = step_tensors(self.step)
        step["positions"] = torch.from_numpy(np.append(self.step.positions, padding))
        del step["kv_lengths"]
        k, v = self.k_pool.clone(), self.v_pool.clone()
        q_out = torch.full_like(self.q, torch.nan)
        launch(
            kernel,
            (triton.cdiv(len(self.q), TOKENS), h + hkv),
            q=self.q,
            k=self.k,
            v=self.v,
            table=self.table,
            q_norm=self.norms[0],
            k_norm=self.norms[1],
            **step,
            k_channel_scale=self.scales[0],
            v_channel_scale=self.scales[1],
            **k.arguments("k"),
            **v.arguments("v"),
            q_out=q_out,
            sequences=len(self.step.kv_lengths),
            table_blocks=self.step.block_tables.shape[1],
            EPS=EPS,
            ROTARY_DIM=rotary_dim,
            NUM_HEADS=h,
            NUM_KV_HEADS=hkv,
            HEAD_DIM=d,
            BLOCK_SIZE=block_size,
            PADDED=triton.next_power_of_2(d),
            TOKENS=TOKENS,
        )
        return q_out, k, v

    def expected(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Q of the tokens, and the elements of their rows [tokens, Hkv, D] in the pools."""
        blocks, hkv, block_size, d = self.k_pool.elements.shape
        pools = LayerPools.filled((blocks, hkv, block_size, d), ["fp32"] * hkv, ["fp32"] * hkv)
        tokens = slice(0, len(self.step.positions))
        step = step_tensors(self.step)
        with bind_kv_pools([pools]):
            q, _ = reference(
                *(x[tokens].float() for x in (self.q, self.k, self.v)),
                None if self.table is None else self.table[tokens],
                *self.norms,
                *(step[name] for name in ("positions", "query_start", "block_tables")),
                0,
                EPS,
                *self.scales,
            )
        k, v = (
            GPU_ROUNDERS[dtype](self.written(pool))
            for dtype, pool in zip(self.kv_dtypes, (pools.k, pools.v), strict=True)
        )
        return q.to(self.activation), k, v

    def written(self, elements: torch.Tensor) -> torch.Tensor:
        """The tokens' rows [tokens, Hkv, D] of a pool."""
        slots = self.step.slots(self.shape[3])
        return torch.stack([elements[block, :, offset] for block, offset in slots])

    def check(self, steps: float = 0, kernel: JitFunction | KernelVariant = rope_kv_write) -> None:
        """steps: how far off elements may be, in parts of the row's largest magnitude."""
        q, k, v = self.run(kernel)
        expected = self.expected()
        tokens = len(self.step.positions)
        assert_close(q[:tokens], expected[0], steps)
        assert q[tokens:].isnan().all()
        assert_close(self.written(k.elements), expected[1], steps)
        assert_close(self.written(v.elements), expected[2], 0)
        for before, after in ((self.k_pool, k), (self.v_pool, v)):
            for old, new in zip(raw_bytes(before), raw_bytes(after), strict=True):
                for block, offset in self.step.slots(self.shape[3]):
                    old[block, :, offset] = new[block, :, offset]
                assert np.array_equal(old, new)


def assert_close(got: torch.Tensor, expected: torch.Tensor, steps: float) -> None:
    if steps == 0:
        assert torch.equal(got.nan_to_num(777), expected.nan_to_num(777))
    largest = expected.abs().float().amax(-1, keepdim=True)
    assert ((got - expected).abs() <= steps * largest).all() or steps == 0


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
@pytest.mark.parametrize("shape", SHAPES[1:])
def test_turned_rows_are_rounded_like_the_reference_and_nothing_else_is_touched(
    shape: Shape, kv_dtype: str
) -> None:
    Case(shape, (kv_dtype, kv_dtype), seed=len(kv_dtype)).check()


@pytest.mark.parametrize("activation", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("kv_dtypes", [("int8", "int4"), ("fp8", "bf16"), ("fp16", "int8-static")])
def test_activations_of_two_bytes_are_computed_in_fp32(
    activation: torch.dtype, kv_dtypes: tuple[str, str]
) -> None:
    Case(SHAPES[1], kv_dtypes, activation).check()


@pytest.mark.parametrize("kv_dtype", ["fp32", "int8", "int8-static", "int4"])
@pytest.mark.parametrize("shape", SHAPES[1:3])
def test_k_and_v_are_divided_by_their_channel_scales(shape: Shape, kv_dtype: str) -> None:
    Case(shape, (kv_dtype, kv_dtype), has_channel_scales=True).check()


@pytest.mark.parametrize(("kv_dtype", "step"), [("fp32", 1e-6), ("int8", 1.01 / 127)])
@pytest.mark.parametrize("shape", SHAPES[1:])
def test_heads_are_normalised_before_they_turn(shape: Shape, kv_dtype: str, step: float) -> None:
    """A sum in another order may move a code by one."""
    Case(shape, (kv_dtype, kv_dtype), has_norms=True).check(step)


@pytest.mark.parametrize("has_norms", [False, True])
def test_without_a_table_nothing_turns(has_norms: bool) -> None:
    Case(SHAPES[2], ("fp32", "fp32"), has_table=False, has_norms=has_norms).check(1e-6 * has_norms)


def test_kernel_is_right_as_it_is_built() -> None:
    kv_dtypes = ("int4", "fp8")
    case = Case(SHAPES[1], kv_dtypes, torch.float16, has_norms=True, has_channel_scales=True)
    h, hkv, d, block_size, rotary_dim = case.shape
    shape = AttentionShape(h, hkv, d, block_size)
    kernel = variant(
        shape, "fp16", kv_dtypes, 80, rotary_dim=rotary_dim, eps=EPS, has_channel_scales=True
    )
    assert kernel.constants["TOKENS"] == TOKENS
    case.check(1.01 / 15, kernel)


def test_more_sequences_than_are_looked_up_at_a_time() -> None:
    sequences = [(s % 5, 1 + s % 2) for s in range(37)]
    Case((1, 1, 16, 4, 16), ("int8", "fp8"), sequences=sequences).check()


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
def test_rows_with_nan_or_infinity_are_kept_as_the_reference_keeps_them(kv_dtype: str) -> None:
    case = Case(SHAPES[1], (kv_dtype, kv_dtype), has_table=False)
    for rows in (case.k, case.v):
        rows[0, 3], rows[1, 0], rows[2, 31], rows[3, 5] = torch.nan, torch.inf, -torch.inf, 1e38
        rows[4] = 0
        rows[5] = 2.5
        rows[6] = 1e-45
    case.check()


def test_e4m3_is_the_nearest_number_with_ties_to_even() -> None:
    """At all numbers, half way between them, and just beside those points."""
    numbers = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).double()
    halfway = (numbers[1:] + numbers[:-1]) / 2
    points = torch.cat((numbers, halfway, torch.tensor([FP8_LARGEST + 16, 500, 1e9]))).float()
    above, below = (torch.nextafter(points, torch.tensor(to)) for to in (1e30, -1.0))
    values = torch.cat((points, above, below))
    values = torch.cat((values, -values))
    tokens = -(-len(values) // 32)
    case = Case((1, 1, 32, 4, 2), ("fp8", "fp8"), sequences=[(0, tokens)], has_table=False)
    case.k[:tokens].view(-1)[: len(values)] = values
    case.check()


def test_fp8_may_be_of_the_type_that_newer_sms_convert() -> None:
    case = Case(SHAPES[1], ("fp8", "fp8"))
    for pool in (case.k_pool, case.v_pool):
        pool.items = pool.items.view(torch.float8_e4m3fn)
    case.check()


@pytest.mark.parametrize("kv_dtype", ["int8-static", "bf16", "fp16"])
def test_ties_go_to_even(kv_dtype: str) -> None:
    step = {"int8-static": 1.0, "bf16": 2.0**-7, "fp16": 2.0**-10}[kv_dtype]
    case = Case((1, 1, 32, 4, 2), (kv_dtype, kv_dtype), sequences=[(0, 4)], has_table=False)
    case.k[:4] = 1 + (torch.arange(128).view(4, 32) + 0.5) * step
    case.k[2:4] *= -1
    case.check()
