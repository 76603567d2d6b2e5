"""A graph weight's values: the rows of its canonical tensors, in the weight's dtype."""

from collections.abc import Callable

import ml_dtypes
import numpy as np
import onnx_ir as ir
import pytest
import torch

from llmbuild.builder.graph.materialise import as_torch, materialise
from llmbuild.builder.graph.step_graph import StepGraph, Weight
from llmbuild.errors import CheckpointError

BF16 = np.dtype(ml_dtypes.bfloat16)


@pytest.fixture
def step_of() -> Callable[..., StepGraph]:
    def build(**weights: Weight) -> StepGraph:
        model = ir.Model(ir.Graph([], [], nodes=[]), ir_version=10)
        return StepGraph(model, weights, {"table": np.arange(3, dtype=np.float32)})

    return build


@pytest.mark.parametrize("stored", [np.dtype(np.float32), np.dtype(np.float16), BF16])
@pytest.mark.parametrize(("dtype", "expected"), [("fp32", np.dtype(np.float32)), ("bf16", BF16)])
def test_merged_weight_is_its_sources_rows_in_order_each_read_once(
    step_of: Callable[..., StepGraph], stored: np.dtype, dtype: str, expected: np.dtype
) -> None:
    rng = np.random.default_rng(0)
    parts = {n: rng.standard_normal((rows, 3)).astype(stored) for n, rows in (("b", 5), ("a", 1))}
    reads: list[str] = []

    def read(name: str) -> np.ndarray:
        reads.append(name)
        return parts[name]

    step = step_of(merged=Weight(("b", "a"), (6, 3), dtype))
    values = materialise(step, "merged", read)
    assert reads == ["b", "a"]
    assert (values.dtype, values.shape) == (expected, (6, 3))
    assert values.flags.c_contiguous
    for row in range(6):
        source = parts["b"][row] if row < 5 else parts["a"][0]
        assert values[row].tolist() == source.astype(np.float32).astype(expected).tolist()


def test_a_single_source_in_its_own_dtype_is_not_copied(step_of: Callable[..., StepGraph]) -> None:
    stored = np.ones((2, 3), np.float32)
    assert materialise(step_of(w=Weight(("s",), (2, 3), "fp32")), "w", lambda _: stored) is stored


def test_a_transposed_source_becomes_row_major(step_of: Callable[..., StepGraph]) -> None:
    stored = np.arange(6, dtype=np.float32).reshape(2, 3).T
    values = materialise(step_of(w=Weight(("s",), (3, 2), "fp32")), "w", lambda _: stored)
    assert values.flags.c_contiguous
    assert values.tolist() == [[0, 3], [1, 4], [2, 5]]


def test_a_constant_is_given_without_a_read(step_of: Callable[..., StepGraph]) -> None:
    def read(name: str) -> np.ndarray:
        raise AssertionError(name)

    assert materialise(step_of(), "table", read).tolist() == [0, 1, 2]


@pytest.mark.parametrize(
    ("dtype", "expected"), [(BF16, torch.bfloat16), (np.float32, torch.float32)]
)
def test_torch_sees_the_same_memory(dtype: np.dtype, expected: torch.dtype) -> None:
    values = np.array([1.5, -2.25], dtype)
    tensor = as_torch(values)
    assert (tensor.dtype, tensor.tolist()) == (expected, [1.5, -2.25])
    tensor[0] = 3.0
    assert values[0] == 3.0


@pytest.mark.parametrize("wrong", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("stored", [np.dtype(np.float32), np.dtype(np.float16), BF16])
@pytest.mark.parametrize("sources", [("a",), ("b", "a")])
def test_tensor_with_a_value_that_is_no_number_is_refused_by_name(
    step_of: Callable[..., StepGraph], sources: tuple[str, ...], stored: np.dtype, wrong: float
) -> None:
    parts = {name: np.ones((2, 3), stored) for name in "ab"}
    parts["a"][1, 2] = wrong
    step = step_of(w=Weight(sources, (2 * len(sources), 3), "fp32"))
    with pytest.raises(CheckpointError, match="a holds 1 values of 6 that are NaN or infinite"):
        materialise(step, "w", parts.__getitem__)
