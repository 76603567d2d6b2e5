"""Weights in blocks of rows are the whole weight's; and the reference that goes through them."""

import tracemalloc
from collections.abc import Callable, Sequence
from typing import Any

import ml_dtypes
import numpy as np
import onnx_ir as ir
import pytest
from numpy.typing import NDArray

from llmbuild.builder.graph import row_blocks
from llmbuild.builder.graph.materialise import materialise, materialise_matrix, weight_parts
from llmbuild.builder.graph.pipeline import run_passes
from llmbuild.builder.graph.reference import run_steps, weight_items
from llmbuild.builder.graph.step_graph import CODES, SCALES, StepGraph, Weight
from llmbuild.errors import CheckpointError
from llmbuild.plugins.common.kv_pools import LayerPools
from llmbuild.quant.grid import QuantisedMatrix, WeightGrid, join_rows
from llmbuild.quant.plan import QuantPlan
from llmbuild.quant.reader import PlannedReader, Ranges, Tensor
from llmbuild.runtime.batch import StepBatch

BF16 = np.dtype(ml_dtypes.bfloat16)
COLUMNS = 32
GRIDS = [WeightGrid(4, 32, True), WeightGrid(8, 0, False)]
FP8 = WeightGrid(8, 0, True, is_fp8=True)


class Tensors:
    """Tensors that can be read in parts, but for those of `whole`. most_rows: read at a time."""

    def __init__(
        self, tensors: dict[str, NDArray[np.generic]], whole: frozenset[str] = frozenset()
    ) -> None:
        self.tensors, self.whole = tensors, whole
        self.whole_reads: list[str] = []
        self.most_rows: dict[str, int] = {}

    def shape(self, name: str) -> tuple[int, ...]:
        return self.tensors[name].shape

    def has_rows(self, name: str) -> bool:
        return name not in self.whole and self.tensors[name].ndim > 1

    def read(self, name: str) -> NDArray[np.generic]:
        self.whole_reads.append(name)
        return self.tensors[name]

    def read_rows(self, name: str, begin: int, end: int) -> NDArray[np.generic]:
        self.most_rows[name] = max(self.most_rows.get(name, 0), end - begin)
        return self.tensors[name][begin:end]

    def stored_grid(self, name: str) -> WeightGrid | None:
        return None

    def read_codes(self, name: str, rows: tuple[int, int] | None = None) -> QuantisedMatrix:
        raise AssertionError(name)


def tensors_of(*rows: int, shape: tuple[int, ...] = (COLUMNS,)) -> dict[str, NDArray[np.generic]]:
    """Tensors a, b, ... with so many rows."""
    rng = np.random.default_rng(len(rows))
    return {
        name: rng.standard_normal((count, *shape), np.float32)
        for name, count in zip("abcd", rows, strict=False)
    }


def step_of(weight: Weight) -> StepGraph:
    model = ir.Model(ir.Graph([], [], nodes=[]), ir_version=10)
    return StepGraph(model, {"w": weight}, {})


def check_blocks(blocks: Sequence[Tensor], max_bytes: int) -> None:
    *before, last = blocks
    for block in before:
        assert block.shape[0] % 16 == 0
    for block in blocks:
        assert 4 * block.size <= max(max_bytes, 4 * 16 * COLUMNS)
        assert block.shape[0] == before[0].shape[0] if before and block is not last else True


ROWS = [(1,), (16,), (37,), (5, 1, 40), (16, 16, 1), (33, 15, 2, 64)]
MAX_BYTES = [1, 4 * 16 * COLUMNS, 4 * 50 * COLUMNS, 1 << 20]


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("max_bytes", MAX_BYTES)
@pytest.mark.parametrize("rows", ROWS, ids=str)
def test_blocks_are_the_rows_of_the_whole_weight(
    rows: tuple[int, ...], max_bytes: int, dtype: str
) -> None:
    stored = tensors_of(*rows)
    weight = Weight(tuple(stored), (sum(rows), COLUMNS), dtype)
    expected = np.concatenate([*stored.values()]).astype({"fp32": np.float32, "bf16": BF16}[dtype])
    for whole in (frozenset(), frozenset("ac")):
        tensors = Tensors(stored, whole)
        read = PlannedReader(tensors, QuantPlan())
        blocks = [*weight_parts(weight, read, max_bytes)]
        check_blocks(blocks, max_bytes)
        for values in (np.concatenate(blocks), materialise(step_of(weight), "w", read)):
            assert values.dtype == expected.dtype
            np.testing.assert_array_equal(values, expected)
        assert sorted(tensors.whole_reads) == sorted(2 * [*(whole & stored.keys())])
    reads: list[str] = []
    blocks = [*weight_parts(weight, lambda n: reads.append(n) or stored[n], max_bytes)]
    check_blocks(blocks, max_bytes)
    np.testing.assert_array_equal(np.concatenate(blocks), expected)
    assert reads == [*stored]


@pytest.mark.parametrize("grid", GRIDS)
@pytest.mark.parametrize("max_bytes", MAX_BYTES)
@pytest.mark.parametrize("rows", ROWS, ids=str)
def test_blocks_of_codes_are_rows_of_the_matrix(
    rows: tuple[int, ...], max_bytes: int, grid: WeightGrid
) -> None:
    stored = tensors_of(*rows)
    weight = Weight(tuple(stored), (sum(rows), COLUMNS), "uint8", grid, CODES)
    read = PlannedReader(Tensors(stored), QuantPlan(dict.fromkeys(stored, grid)))
    expected = join_rows(
        [matrix for name in stored if isinstance(matrix := read(name), QuantisedMatrix)]
    )
    for reader in (read, lambda name: read(name)):
        blocks = [*weight_parts(weight, reader, max_bytes)]
        check_blocks(blocks, max_bytes)
        joined = join_rows([block for block in blocks if isinstance(block, QuantisedMatrix)])
        scales = Weight(weight.sources, (sum(rows), 1), "fp16", grid, SCALES)
        for matrix in (
            joined,
            materialise_matrix(weight, reader),
            materialise_matrix(scales, reader),
        ):
            for ours, theirs in zip(matrix.arrays, expected.arrays, strict=True):
                np.testing.assert_array_equal(ours, theirs)


def test_a_stacks_blocks_are_whole_matrices_and_a_vectors_any_items() -> None:
    stack = tensors_of(5, shape=(3, 7))
    weight = Weight(("a",), (5, 3, 7), "fp32")
    read = PlannedReader(Tensors(stack), QuantPlan())
    for max_bytes, counts in ((1, [1] * 5), (4 * 21 * 2 + 3, [2, 2, 1]), (1 << 20, [5])):
        blocks = [*weight_parts(weight, read, max_bytes)]
        assert [block.shape[0] for block in blocks] == counts
        np.testing.assert_array_equal(np.concatenate(blocks), stack["a"])
    biases = tensors_of(3, 4, shape=())
    (block,) = weight_parts(Weight(("a", "b"), (7,), "fp32"), biases.__getitem__, 1 << 10)
    np.testing.assert_array_equal(block, np.concatenate([*biases.values()]))


@pytest.mark.parametrize("grid", [None, *GRIDS])
def test_a_value_that_is_no_number_is_refused_in_its_block_by_name(grid: WeightGrid | None) -> None:
    stored = tensors_of(16, 40)
    stored["b"][17, 3] = np.nan
    plan = QuantPlan({} if grid is None else dict.fromkeys(stored, grid))
    part = "" if grid is None else CODES
    weight = Weight(("a", "b"), (56, COLUMNS), "fp32" if grid is None else "uint8", grid, part)
    blocks = weight_parts(weight, PlannedReader(Tensors(stored), plan), 1)
    next(blocks)
    next(blocks)
    words = "^a part of b holds 1 values of 512 that are NaN" if grid is None else "^b holds values"
    with pytest.raises(CheckpointError, match=words):
        next(blocks)


def test_blocks_hold_little_beside_one() -> None:
    """Of a matrix of 32 MB, whose file a reader of zeros stands for."""

    class Zeros(Tensors):
        def read_rows(self, name: str, begin: int, end: int) -> NDArray[np.generic]:
            return np.zeros((end - begin, 1024), np.float32)

    shape = np.broadcast_to(np.float32(0), (4096, 1024))
    read = PlannedReader(Zeros({"a": shape, "b": shape}), QuantPlan())
    weight = Weight(("a", "b"), (8192, 1024), "bf16")
    tracemalloc.start()
    try:
        rows = sum(block.shape[0] for block in weight_parts(weight, read, 1 << 20))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert rows == 8192
    assert peak < 6 << 20


WIDE = {"hidden_size": 64, "intermediate_size": 96, "num_heads": 4, "head_dim": 16}
VARIANTS: dict[str, dict[str, Any]] = {
    "tied, biases": {"tie_embeddings": True, "qkv_bias": True, "o_bias": True, "mlp_bias": True},
    "bf16": {"precision": "bf16"},
    "head with a bias": {"head_bias": True, "learned_positions": True},
}
PLANS: dict[str, WeightGrid | None] = {"plain": None, "symmetric": GRIDS[0], "minima": GRIDS[1]}
PLANS |= {"fp8": FP8}


@pytest.mark.parametrize("activation_group", [0, 32])
@pytest.mark.parametrize("grid", PLANS.values(), ids=PLANS)
@pytest.mark.parametrize("features", VARIANTS.values(), ids=VARIANTS)
def test_the_reference_gives_the_same_in_blocks_and_holds_no_matrix(
    monkeypatch: pytest.MonkeyPatch,
    traced: Callable[..., StepGraph],
    random_tensors: Callable[[StepGraph], dict[str, NDArray[np.generic]]],
    empty_pools: Callable[..., list[LayerPools]],
    batches: list[StepBatch],
    features: dict[str, Any],
    grid: WeightGrid | None,
    activation_group: int,
) -> None:
    """Merged linears, with the biases of their rows; scales and minima; tables; a tied head."""
    variant = WIDE | features
    step = traced(**variant)
    stored = random_tensors(step)
    matrices = {name for name, values in stored.items() if values.ndim == 2}
    plan = (
        QuantPlan()
        if grid is None
        else QuantPlan(dict.fromkeys(matrices, grid), dict.fromkeys(matrices, activation_group))
    )
    run_passes(step, plan=plan)
    tensors = Tensors(stored)
    read = PlannedReader(tensors, plan)
    expected = run_steps(step, lambda name: read(name), batches, empty_pools(**variant))
    assert matrices <= {*tensors.whole_reads}
    tensors.whole_reads.clear()
    monkeypatch.setattr(row_blocks, "BLOCK_BYTES", 1)
    told: list[int] = []
    got = run_steps(step, read, batches, empty_pools(**variant), told.append)
    for ours, theirs in zip(got, expected, strict=True):
        assert ours.shape == theirs.shape
        np.testing.assert_allclose(ours, theirs, atol=1e-5 * float(np.abs(theirs).max()))
    assert not matrices & {*tensors.whole_reads}
    assert tensors.most_rows.keys() == matrices
    assert max(tensors.most_rows.values()) <= 16
    assert sum(told) == sum(weight_items(step, node) for node in step.graph)
    assert sum(told) >= sum(values.size for values in stored.values())


def test_small_matrices_are_held_as_they_are_and_read_once(
    traced: Callable[..., StepGraph],
    random_tensors: Callable[[StepGraph], dict[str, NDArray[np.generic]]],
    empty_pools: Callable[..., list[LayerPools]],
    batches: list[StepBatch],
) -> None:
    step = traced(tie_embeddings=True)
    stored = random_tensors(step)
    run_passes(step)
    parts: list[tuple[str, Ranges]] = []

    class Noting(PlannedReader):
        def read_part(self, name: str, ranges: Sequence[Ranges]) -> Tensor:
            parts.append((name, ranges[0]))
            return super().read_part(name, ranges)

    run_steps(step, Noting(Tensors(stored), QuantPlan()), batches, empty_pools())
    matrices = {name: values for name, values in stored.items() if values.ndim > 1}
    assert sorted(parts) == sorted((n, ((0, len(v)),)) for n, v in matrices.items())
