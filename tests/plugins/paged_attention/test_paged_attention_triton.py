"""The Triton kernels of paged_attention, interpreted, against the torch reference."""

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from triton_harness import KV_DTYPES, launch, pad_step, random_pools, step_tensors, triton

from llmbuild.plugins.common.attention_variant import SMOLLM2
from llmbuild.plugins.common.kernel_variant import JitFunction, KernelVariant
from llmbuild.plugins.common.kv_pools import LayerPools, bind_kv_pools
from llmbuild.plugins.paged_attention.op import paged_attention
from llmbuild.plugins.paged_attention.triton import (
    AttentionType,
    combine,
    combine_variant,
    decode,
    decode_variant,
    prefill,
    prefill_variant,
)

# (H, Hkv, D, block size): groups of 1, 3, 4, 7 and 8.
SHAPES = [(2, 2, 80, 5), (3, 1, 64, 16), (8, 2, 32, 4), (7, 1, 96, 3), (8, 1, 128, 8)]
KEYS = 16
# (computed tokens, new tokens); contexts around a block and around the keys read at a time.
DECODE = [(0, 1), (3, 1), (15, 1), (16, 1), (69, 1)]
MIXED = [(0, 1), (0, 23), (14, 1), (5, 9), (40, 2), (16, 1)]
PADDING_SEQUENCES, PADDING_ROWS = 2, 3

Shape = tuple[int, int, int, int]
Kernel = JitFunction | KernelVariant

# numpy's, of rows that see no key of a tile
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


@dataclass
class Case:
    shape: Shape
    sequences: list[tuple[int, int]]
    kv_dtypes: tuple[str, str] = ("fp32", "fp32")
    activation: torch.dtype = torch.float32
    window: int = 0
    soft_cap: float = 0.0
    has_sinks: bool = False
    has_channel_scales: bool = False

    def __post_init__(self) -> None:
        h, hkv, d, block_size = self.shape
        rng = np.random.default_rng(h + self.window)
        step, self.k, self.v = random_pools(self.sequences, self.kv_dtypes, hkv, d, block_size, rng)
        self.tokens = len(step.positions)
        self.step = pad_step(step, PADDING_SEQUENCES)
        self.scale = 1.7 * d**-0.5
        # Codes of "int8-static" are 40 times as large as other elements.
        channel_scales = rng.uniform(0.5, 2, (2, hkv * d))
        channel_scales /= [[40 if dtype == "int8-static" else 1] for dtype in self.kv_dtypes]
        q = rng.standard_normal((self.tokens + PADDING_ROWS, h * d))
        if not self.has_channel_scales:
            q *= channel_scales[0].min() / 0.5
        self.q = torch.from_numpy(q).to(self.activation)
        self.channel_scales = [
            torch.from_numpy(each).float() if self.has_channel_scales else None
            for each in channel_scales
        ]
        self.sinks = torch.linspace(-20, 4, h) if self.has_sinks else None

    @property
    def kernel_constants(self) -> dict[str, int]:
        h, hkv, d, _ = self.shape
        padded = triton.next_power_of_2(d)
        return {"GROUP": h // hkv, "NUM_KV_HEADS": hkv, "HEAD_DIM": d, "PADDED": padded}

    @property
    def attend_arguments(self) -> dict[str, object]:
        """What decode and prefill have in common, but for the tile."""
        return {
            "q": self.q,
            "k_channel_scale": self.channel_scales[0],
            **self.k.arguments("k"),
            **self.v.arguments("v"),
            "table_blocks": self.step.block_tables.shape[1],
            "SCALE": self.scale,
            "WINDOW": self.window,
            "SOFT_CAP": self.soft_cap,
            "BLOCK_SIZE": self.shape[3],
            "KEYS": KEYS,
            **self.kernel_constants,
        }

    def decode(
        self, splits: int, kernels: tuple[Kernel, Kernel] = (decode, combine)
    ) -> torch.Tensor:
        h, hkv, d, _ = self.shape
        sequences = len(self.step.kv_lengths)
        out = torch.full_like(self.q, torch.nan)
        partial_out = torch.full((sequences, h, splits, d), torch.nan)
        partial_stats = torch.full((sequences, h, splits, 2), torch.nan)
        step = step_tensors(self.step)
        del step["positions"]
        scratch = {"partial_out": partial_out, "partial_stats": partial_stats, "splits": splits}
        rows = max(16, triton.next_power_of_2(h // hkv))
        grid = (sequences, hkv, splits)
        launch(kernels[0], grid, **step, **scratch, **self.attend_arguments, ROWS=rows)
        assert partial_out[len(self.sequences) :].isnan().all()
        del step["block_tables"]
        launch(
            kernels[1],
            (sequences, h),
            **step,
            **scratch,
            **self.kernel_constants,
            sinks=self.sinks,
            v_channel_scale=self.channel_scales[1],
            out=out,
            MAX_SPLITS=triton.next_power_of_2(splits),
        )
        return out

    def prefill(
        self, rows: int = 16, tiles: int | None = None, kernel: Kernel = prefill
    ) -> torch.Tensor:
        """tiles: how many are launched, by default those that the shapes need."""
        h, hkv, _, _ = self.shape
        sequences = len(self.step.kv_lengths)
        out = torch.full_like(self.q, torch.nan)
        step = step_tensors(self.step)
        del step["positions"]
        launch(
            kernel,
            (tiles or len(self.q) // (rows // (h // hkv)) + sequences, hkv),
            **step,
            **self.attend_arguments,
            sinks=self.sinks,
            v_channel_scale=self.channel_scales[1],
            out=out,
            sequences=sequences,
            ROWS=rows,
        )
        return out

    def check(self, out: torch.Tensor) -> None:
        pools = LayerPools(self.k.elements, self.v.elements)
        with bind_kv_pools([pools]):
            expected = paged_attention(
                self.q[: self.tokens].float(),
                torch.zeros(1, dtype=torch.int32),
                *step_tensors(self.step).values(),
                self.sinks,
                0,
                self.scale,
                self.window,
                self.soft_cap,
                *self.channel_scales,
            )
        largest = expected.abs().max()
        tolerance = {torch.float32: 1e-5, torch.float16: 3e-3}[self.activation]
        assert (out[: self.tokens].float() - expected).abs().max() <= tolerance * largest
        assert out[self.tokens :].isnan().all()


@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("shape", SHAPES)
def test_decode_of_shuffled_blocks_in_splits_equals_the_reference(
    shape: Shape, splits: int
) -> None:
    case = Case(shape, DECODE)
    case.check(case.decode(splits))


@pytest.mark.parametrize("shape", SHAPES)
def test_prefill_of_any_mix_equals_the_reference(shape: Shape) -> None:
    case = Case(shape, MIXED)
    case.check(case.prefill())


@pytest.mark.parametrize("kv_dtype", KV_DTYPES[1:])
@pytest.mark.parametrize("has_channel_scales", [False, True])
def test_every_kv_dtype_is_read_as_the_reference_reads_it(
    kv_dtype: str, has_channel_scales: bool
) -> None:
    kv_dtypes = (kv_dtype, kv_dtype)
    case = Case(SHAPES[0], DECODE, kv_dtypes, has_channel_scales=has_channel_scales)
    case.check(case.decode(2))
    case = Case(SHAPES[1], MIXED[1:4], kv_dtypes, has_channel_scales=has_channel_scales)
    case.check(case.prefill())


def test_fp8_may_be_of_the_type_that_newer_sms_convert() -> None:
    case = Case(SHAPES[2], DECODE, ("fp8", "fp8"))
    for pool in (case.k, case.v):
        pool.items = pool.items.view(torch.float8_e4m3fn)
    case.check(case.decode(2))
    case.check(case.prefill())


@pytest.mark.parametrize("kv_dtypes", [("int8", "int4"), ("fp8", "int8"), ("int4", "fp16")])
def test_fp16_activations_with_k_and_v_of_two_dtypes(kv_dtypes: tuple[str, str]) -> None:
    case = Case(SHAPES[2], DECODE, kv_dtypes, torch.float16, has_channel_scales=True)
    case.check(case.decode(2))
    case = Case(SHAPES[2], MIXED[1:4], kv_dtypes, torch.float16, has_channel_scales=True)
    case.check(case.prefill())


@pytest.mark.parametrize("window", [1, 5, 17, 1000])
def test_window_hides_what_is_further_back(window: int) -> None:
    case = Case(SHAPES[2], DECODE, window=window)
    case.check(case.decode(3))
    case = Case(SHAPES[2], MIXED, window=window)
    case.check(case.prefill(rows=32))


@pytest.mark.parametrize("soft_cap", [0.0, 0.5])
@pytest.mark.parametrize("window", [0, 4])
def test_scores_are_capped_and_sinks_take_weight(soft_cap: float, window: int) -> None:
    case = Case(SHAPES[1], DECODE, window=window, soft_cap=soft_cap, has_sinks=True)
    case.check(case.decode(3))
    case = Case(SHAPES[1], MIXED, window=window, soft_cap=soft_cap, has_sinks=True)
    case.check(case.prefill())


def test_blocks_behind_the_window_and_beyond_the_context_are_not_read() -> None:
    """They may belong to others, or hold NaN."""
    case = Case(SHAPES[2], DECODE, window=6)
    _, _, _, block_size = case.shape
    live = torch.zeros(len(case.k.items), block_size, dtype=torch.bool)
    for s, length in enumerate(case.step.kv_lengths):
        for position in range(max(0, length - case.window), length):
            live[case.step.block_tables[s, position // block_size], position % block_size] = True
    case.check(case.decode(2))
    out = case.decode(2)
    for pool in (case.k, case.v):
        pool.items[~live[:, None].expand(pool.items.shape[:-1])] = torch.nan
    assert torch.equal(case.decode(2)[: case.tokens], out[: case.tokens])
    assert not case.prefill()[: case.tokens].isnan().any()


@pytest.mark.parametrize("sm", [80, 86, 100])
def test_kernels_are_right_as_they_are_built(sm: int) -> None:
    """On SM 80 and 86 FP8 is decoded from bytes."""
    kv_dtypes = ("int8", "int4") if sm == 100 else ("int8", "fp8")
    shape = (SMOLLM2.num_heads, SMOLLM2.num_kv_heads, SMOLLM2.head_dim, SMOLLM2.block_size)
    case = Case(shape, DECODE, kv_dtypes, torch.float16, 40, 20.0, has_sinks=True)
    of = AttentionType(SMOLLM2, "fp16", *kv_dtypes, case.scale, 40, 20.0, has_sinks=True)
    case.check(case.decode(3, (decode_variant(of, sm), combine_variant(of, sm))))
    case = Case(shape, MIXED, kv_dtypes, torch.float16, 40, 20.0, has_sinks=True)
    kernel = prefill_variant(of, sm)
    case.check(case.prefill(rows=kernel.constants["ROWS"], kernel=kernel))


def test_more_sequences_than_are_looked_up_at_a_time() -> None:
    case = Case((1, 1, 16, 4), [(s % 3, 1 + (s % 11 == 0) * 20) for s in range(70)])
    case.check(case.prefill())


def test_tile_writes_its_own_tokens_alone() -> None:
    """A tile of 16 rows has 5 tokens with 3 heads each, and a row to spare."""
    case = Case(SHAPES[1], [(2, 9)])
    out = case.prefill(tiles=1)
    assert torch.equal(out[:5], case.prefill()[:5])
    assert out[5:].isnan().all()


def test_small_scales_lose_nothing_in_fp16() -> None:
    """Weights times such scales would be nothing in fp16."""
    kv_dtypes = ("int8", "int8")
    case = Case(SHAPES[1], MIXED[1:4], kv_dtypes, torch.float16, has_channel_scales=True)
    assert case.v.scales is not None
    case.v.scales *= 2.0**-20
    case.channel_scales[1] *= 2.0**20
    case.check(case.prefill())


@pytest.mark.parametrize("kv_dtype", ["fp16", "bf16", "int8", "fp8", "int4"])
def test_sequence_that_reads_a_nan_gives_nan_and_others_do_not(kv_dtype: str) -> None:
    case = Case(SHAPES[2], DECODE[:3], (kv_dtype, kv_dtype))
    block = case.step.block_tables[1, 0]
    if case.v.scales is not None:
        case.v.scales[block, :, 2] = torch.nan
    else:
        case.v.items[block, :, 2] = 0x7F if kv_dtype == "fp8" else torch.nan
    for out in (case.decode(2), case.prefill()):
        assert out[1].isnan().all()
        assert not out[[0, 2]].isnan().any()
