"""Static scales of int8 activations become constants, shared and merged by what they hold."""

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
from numpy.typing import NDArray

from llmbuild.builder.graph.passes.merge_linears import merge_linears
from llmbuild.builder.graph.passes.quantise import quantise
from llmbuild.builder.graph.passes.verify import verify
from llmbuild.builder.graph.pipeline import run_passes
from llmbuild.builder.graph.reference import run_steps
from llmbuild.builder.graph.step_graph import StepGraph
from llmbuild.errors import BuildError
from llmbuild.plugins.common.kv_pools import LayerPools
from llmbuild.quant.grid import WeightGrid
from llmbuild.quant.plan import QuantPlan
from llmbuild.quant.rtn import round_to_nearest
from llmbuild.runtime.batch import StepBatch

Kinds = Callable[[StepGraph], list[str]]
Scales = NDArray[np.float32]
ROWS = ("R", 64)
INT4, INT8 = WeightGrid(4, 32, False), WeightGrid(8, 0, True)
FP8 = WeightGrid(8, 0, True, is_fp8=True)
ZERO_POINTS = WeightGrid(4, 32, False, zero_points=True)


def linear(sketch: Any, x: ir.Value, name: str, rows: int, bias: bool = False) -> ir.Value:
    weights = [sketch.weight(name, (rows, 64))]
    weights += [sketch.weight(f"{name}.bias", (rows,))] if bias else []
    return sketch.node("linear", [x, *weights], (x.shape[0], rows))


def names_of(node: ir.Node) -> list[str | None]:
    return [None if value is None else value.name for value in node.inputs]


def plan_of(grids: dict[str, WeightGrid], scales: dict[str, list[float]]) -> QuantPlan:
    arrays = {name: np.array(values, np.float32) for name, values in scales.items()}
    return QuantPlan(grids, dict.fromkeys(grids, 32), activation_scales=arrays)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("grid", [INT4, INT8, ZERO_POINTS], ids=["minima", "row", "zeros"])
def test_a_linear_reads_its_scales_after_all_parts_of_its_matrix(
    sketch: Any, grid: WeightGrid, bias: bool
) -> None:
    step = sketch.step(linear(sketch, sketch.input("x", ROWS), "w", 5, bias))
    quantise(step, plan_of({"w": grid}, {"w": [0.5, 0.25]}))
    (node,) = step.graph
    *_, zeros, scales = names_of(node)
    assert len(node.inputs) == 7
    assert zeros == ("w.zeros" if grid.zero_points else None)
    assert scales == "w.activation_scales"
    np.testing.assert_array_equal(step.constants["w.activation_scales"], [0.5, 0.25])
    value = step.graph.initializers["w.activation_scales"]
    assert (value.dtype, tuple(value.shape)) == (ir.DataType.FLOAT, (2,))


def test_linears_share_equal_scales_and_of_one_value_those_alone_merge(
    sketch: Any, kinds: Kinds
) -> None:
    """a and c; b has others; d rounds as it runs, like e; f has a's on another grid."""
    x = sketch.input("x", ROWS)
    step = sketch.step(*(linear(sketch, x, name, 5) for name in "abcdef"))
    grids = dict.fromkeys("abcde", INT4) | {"f": INT8}
    scales = {"a": [0.5, 0.25], "b": [0.5, 0.125], "c": [0.5, 0.25], "f": [0.5, 0.25]}
    quantise(step, plan_of(grids, scales))
    merge_linears(step)
    assert set(step.constants) == {"a.activation_scales", "b.activation_scales"}
    linears = [node for node in step.graph if node.op_type == "quantised_linear"]
    assert {(node.inputs[1].name, *names_of(node)[6:]) for node in linears} == {
        ("a+c.codes", "a.activation_scales"),
        ("b.codes", "b.activation_scales"),
        ("d+e.codes",),
        ("f.codes", "a.activation_scales"),
    }
    assert kinds(step).count("Split") == 2


def test_a_matrix_that_multiplies_two_values_has_its_scales_once(sketch: Any, kinds: Kinds) -> None:
    weight = sketch.weight("w", (5, 64))
    inputs = [sketch.input(name, ROWS) for name in "xy"]
    step = sketch.step(*(sketch.node("linear", [x, weight], ("R", 5)) for x in inputs))
    quantise(step, plan_of({"w": INT4}, {"w": [1, 2]}))
    merge_linears(step)
    assert kinds(step) == ["quantised_linear"] * 2
    scales = step.graph.initializers["w.activation_scales"]
    assert [node.inputs[6] for node in step.graph] == [scales, scales]
    assert set(step.graph.initializers) == {*step.weights, *step.constants}


@pytest.mark.parametrize(
    ("scales", "words"),
    [
        ([0.5, 0.0], ["columns 32 to 63 (group 1) is 0.0"]),
        ([-0.5, 0.5], ["columns 0 to 31 (group 0) is -0.5"]),
        ([0.5, float("nan")], ["(group 1) is nan"]),
        ([float("inf"), 0.5], ["(group 0) is inf"]),
        ([0.5, 1e-40], ["(group 1) is 9.9", "e-41"]),  # its reciprocal is beyond fp32
        ([0.5], ["columns 32 to 63 (group 1) is missing"]),
        ([], ["columns 0 to 31 (group 0) is missing"]),
    ],
)
def test_a_scale_that_is_zero_or_missing_is_refused_with_its_tensor_and_group(
    sketch: Any, scales: list[float], words: list[str]
) -> None:
    outputs = [linear(sketch, sketch.input(x, ROWS), w, 5) for x, w in ("xa", "yb")]
    step = sketch.step(*outputs)
    with pytest.raises(BuildError) as refused:
        quantise(step, plan_of({"a": INT4, "b": INT4}, {"a": [1, 2], "b": scales}))
    for word in ["b: the static scale", *words, "must be a number above zero"]:
        assert word in str(refused.value)


@pytest.mark.parametrize(
    ("scales", "words"), [([0.0], "(group 0) is 0.0"), ([], "(group 0) is missing")]
)
def test_fp8_activations_without_a_scale_are_refused(
    sketch: Any, scales: list[float], words: str
) -> None:
    step = sketch.step(linear(sketch, sketch.input("x", ROWS), "w", 5))
    given = {"w": np.array(scales, np.float32)}
    plan = QuantPlan({"w": FP8}, {"w": 64}, static=frozenset("w"), activation_scales=given)
    with pytest.raises(BuildError) as refused:
        quantise(step, plan)
    assert f"w: the static scale of its activations' columns 0 to 63 {words}" in str(refused.value)


WIDE = {"hidden_size": 64, "intermediate_size": 96, "num_heads": 4, "head_dim": 16}


def test_the_reference_runs_static_scales(
    traced: Callable[..., StepGraph],
    random_tensors: Callable[..., dict[str, NDArray[np.generic]]],
    empty_pools: Callable[..., list[LayerPools]],
    batches: list[StepBatch],
) -> None:
    """The narrower they are, the more values saturate; the contract holds."""
    tensors = random_tensors(traced(**WIDE))

    def logits(scale: float | None) -> NDArray[np.float32]:
        step = traced(**WIDE)
        grids = {name: INT8 for name in step.weights if name.endswith("proj.weight")}
        groups = {name: step.weights[name].shape[1] // 32 for name in grids}
        given = {} if scale is None else {n: [scale] * count for n, count in groups.items()}
        run_passes(step, plan=plan_of(grids, given))
        verify(step)

        def read(name: str) -> Any:
            return round_to_nearest(tensors[name], INT8) if name in grids else tensors[name]

        return np.concatenate(run_steps(step, read, batches, empty_pools(**WIDE)))

    dynamic = logits(None)

    def distance(scale: float) -> float:
        difference = logits(scale) - dynamic
        return float(np.sqrt(np.mean(difference**2) / np.mean(dynamic**2)))

    assert 0.01 < distance(0.1) < 0.3 < distance(0.02) < distance(0.01)
