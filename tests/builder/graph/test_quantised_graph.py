"""A quantised step graph: what is saved of it, and that the reference runs what its codes mean."""

import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from numpy.typing import NDArray

from llmbuild.builder.graph.onnx_domain import translation_table
from llmbuild.builder.graph.passes.verify import verify
from llmbuild.builder.graph.pipeline import run_passes
from llmbuild.builder.graph.reference import run_steps
from llmbuild.builder.graph.step_graph import StepGraph
from llmbuild.errors import CheckpointError
from llmbuild.plugins.common.kv_pools import LayerPools
from llmbuild.quant.grid import QuantisedMatrix, WeightGrid
from llmbuild.quant.plan import QuantPlan
from llmbuild.quant.rtn import round_to_nearest
from llmbuild.runtime.batch import StepBatch

Tensors = dict[str, NDArray[np.generic]]
VARIANT = {"hidden_size": 64, "intermediate_size": 96, "num_heads": 4, "head_dim": 16}
VARIANT |= {"tie_embeddings": True, "qkv_bias": True}
SYMMETRIC, ASYMMETRIC = WeightGrid(4, 32, True), WeightGrid(8, 0, False)


def grid_of(name: str) -> WeightGrid | None:
    """Q and K on one grid, V and the embedding on another, o_proj left alone."""
    if name.endswith(("v_proj.weight", "embed.weight", "down_proj.weight")):
        return ASYMMETRIC
    return SYMMETRIC if name.endswith("proj.weight") and "o_proj" not in name else None


def plan_of(step: StepGraph, activation_group: int = 0) -> QuantPlan:
    grids = {name: grid for name in step.weights if (grid := grid_of(name)) is not None}
    return QuantPlan(grids, dict.fromkeys(grids, activation_group) if activation_group else {})


@pytest.fixture
def quantised(traced: Callable[..., StepGraph]) -> Callable[..., StepGraph]:
    """quantised(activation_group=0): the graph of VARIANT after all passes."""

    def build(activation_group: int = 0) -> StepGraph:
        step = traced(**VARIANT)
        run_passes(step, plan=plan_of(step, activation_group))
        return step

    return build


def reader(tensors: Tensors) -> Callable[[str], NDArray[np.generic] | QuantisedMatrix]:
    def read(name: str) -> NDArray[np.generic] | QuantisedMatrix:
        grid = grid_of(name)
        return tensors[name] if grid is None else round_to_nearest(tensors[name], grid)

    return read


def test_linears_merge_by_grid_and_the_contract_holds(
    quantised: Callable[..., StepGraph],
) -> None:
    step = quantised(32)
    verify(step)
    sources = {weight.sources for weight in step.weights.values() if weight.part == "codes"}
    for layer in range(2):
        attention, mlp = f"layers.{layer}.attention.", f"layers.{layer}.mlp."
        assert {
            (f"{attention}q_proj.weight", f"{attention}k_proj.weight"),
            (f"{attention}v_proj.weight",),
            (f"{mlp}gate_proj.weight", f"{mlp}up_proj.weight"),
            (f"{mlp}down_proj.weight",),
        } <= sources
    kinds = Counter(node.op_type for node in step.graph)
    assert (kinds["quantised_linear"], kinds["linear"]) == (2 * 4 + 1, 2)
    assert (kinds["gather_quantised_rows"], kinds["gather_rows"]) == (1, 2)
    # What the passes place of an unquantised graph they place all the same.
    assert (kinds["gated_activation"], kinds["rope_kv_write"], kinds["add_rms_norm"]) == (2, 2, 4)


def test_saved_graph_lists_the_parts_with_their_types_and_sources(
    quantised: Callable[..., StepGraph], tmp_path: Path
) -> None:
    step = quantised(32)
    step.save(tmp_path / "step.onnx")
    translation_table()  # gives our domain's schemas to the checker
    model = onnx.load(tmp_path / "step.onnx")
    onnx.checker.check_model(model, full_check=True)
    assert not model.graph.initializer
    types = {"uint8": onnx.TensorProto.UINT8, "fp16": onnx.TensorProto.FLOAT16}
    types["fp32"] = onnx.TensorProto.FLOAT
    inputs = {value.name: value for value in model.graph.input}
    for name, weight in step.weights.items():
        tensor = inputs[name].type.tensor_type
        assert tensor.elem_type == types[weight.dtype], name
        assert tuple(dim.dim_value for dim in tensor.shape.dim) == weight.shape
        (sources,) = (p.value for p in inputs[name].metadata_props if p.key == "sources")
        assert tuple(sources.split()) == weight.sources
    parts = {name.rpartition(".")[2] for name in inputs if "embed" in name}
    assert parts == {"codes", "scales", "minima"}
    zeros = {
        node.input[1]: {a.name: a.i for a in node.attribute}["zero"]
        for node in model.graph.node
        if node.op_type == "quantised_linear"
    }
    assert {zero for name, zero in zeros.items() if "v_proj" in name} == {0}
    assert {zero for name, zero in zeros.items() if re.search("q_proj|gate_proj", name)} == {8}


def test_weight_only_quantisation_is_the_model_with_the_rounded_weights(
    traced: Callable[..., StepGraph],
    quantised: Callable[..., StepGraph],
    random_tensors: Callable[[StepGraph], Tensors],
    empty_pools: Callable[..., list[LayerPools]],
    batches: list[StepBatch],
) -> None:
    step = traced(**VARIANT)
    read = reader(random_tensors(step))

    def dequantised(name: str) -> NDArray[np.generic]:
        values = read(name)
        return values.dequantised() if isinstance(values, QuantisedMatrix) else values

    expected = run_steps(step, dequantised, batches, empty_pools(**VARIANT))
    plain = run_steps(step, random_tensors(step).__getitem__, batches, empty_pools(**VARIANT))
    got = run_steps(quantised(), read, batches, empty_pools(**VARIANT))
    for ours, same, before in zip(got, expected, plain, strict=True):
        largest = np.abs(same).max()
        assert np.abs(ours - same).max() <= 1e-5 * largest
        assert np.abs(before - same).max() > 1e-3 * largest  # so it is the rounded ones


def test_int8_activations_change_logits_by_little_and_by_more_than_rounding(
    quantised: Callable[..., StepGraph],
    traced: Callable[..., StepGraph],
    random_tensors: Callable[[StepGraph], Tensors],
    empty_pools: Callable[..., list[LayerPools]],
    batches: list[StepBatch],
) -> None:
    read = reader(random_tensors(traced(**VARIANT)))
    fp32 = run_steps(quantised(0), read, batches, empty_pools(**VARIANT))
    int8 = run_steps(quantised(32), read, batches, empty_pools(**VARIANT))
    for ours, other in zip(int8, fp32, strict=True):
        difference = np.abs(ours - other).max() / np.abs(other).max()
        assert 1e-5 < difference < 0.1


def test_every_tensor_is_read_once_a_matrix_with_all_its_parts(
    quantised: Callable[..., StepGraph],
    traced: Callable[..., StepGraph],
    random_tensors: Callable[[StepGraph], Tensors],
    empty_pools: Callable[..., list[LayerPools]],
    batches: list[StepBatch],
) -> None:
    tensors, reads = random_tensors(traced(**VARIANT)), Counter[str]()

    def read(name: str) -> Any:
        reads[name] += 1
        return reader(tensors)(name)

    run_steps(quantised(32), read, batches, empty_pools(**VARIANT))
    assert reads == Counter(tensors.keys())


@pytest.mark.parametrize("name", ["embed.weight", "layers.1.attention.k_proj.weight"])
@pytest.mark.parametrize("wrong", [np.nan, np.inf, -np.inf])
def test_a_quantised_tensor_with_a_value_that_is_no_number_is_refused_by_name(
    quantised: Callable[..., StepGraph],
    traced: Callable[..., StepGraph],
    random_tensors: Callable[[StepGraph], Tensors],
    empty_pools: Callable[..., list[LayerPools]],
    batches: list[StepBatch],
    name: str,
    wrong: float,
) -> None:
    tensors = random_tensors(traced(**VARIANT))
    tensors[name][3, 7] = wrong
    with pytest.raises(CheckpointError, match=f"{re.escape(name)} holds .* NaN, infinite"):
        run_steps(quantised(32), reader(tensors), batches, empty_pools(**VARIANT))
