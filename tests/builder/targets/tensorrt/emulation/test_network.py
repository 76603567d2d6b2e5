"""What an emulated network refuses, when it grows and when it runs, and how it rounds."""

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from llmbuild.builder.targets.tensorrt.emulation.module import DataType, EmulatedTensorRT
from llmbuild.builder.targets.tensorrt.emulation.network import EmulatedNetwork
from llmbuild.builder.targets.tensorrt.emulation.tensors import Tensor
from llmbuild.errors import BuildError, InternalError

TRT = EmulatedTensorRT()
ONE = np.array(1, np.float32)
F16, F32, I32 = DataType.float16, DataType.float32, DataType.int32


def rows(network: EmulatedNetwork, name: str, width: int, dtype: DataType = F16) -> Tensor:
    """An input [T, width]."""
    tensor = network.add_input(name, dtype, (-1, width))
    tensor.set_dimension_name(0, "T")
    return tensor


def constant(network: EmulatedNetwork, values: np.ndarray, dtype: DataType) -> Tensor:
    weights = TRT.Weights(dtype, values.ctypes.data, values.size)
    return network.add_constant(values.shape, weights).get_output(0)


def reshaped(network: EmulatedNetwork) -> Any:
    layer = network.add_shuffle(network.add_input("x", F16, (3, 3)))
    layer.reshape_dims = (-1, 4)
    return layer


WRONG: dict[str, tuple[Callable[[EmulatedNetwork], Any], str]] = {
    "two dtypes": (
        lambda n: n.add_elementwise(rows(n, "a", 4), rows(n, "b", 4, F32), "SUM"),
        "dtypes fp16, fp32 differ",
    ),
    "two widths": (
        lambda n: n.add_elementwise(rows(n, "a", 4), rows(n, "b", 5), "SUM"),
        "sizes 4 and 5 differ",
    ),
    "two ranks": (
        lambda n: n.add_elementwise(rows(n, "a", 4), n.add_input("b", F16, (4,)), "SUM"),
        "ranks differ",
    ),
    "a product of integers": (
        lambda n: n.add_matrix_multiply(
            rows(n, "a", 4, I32), "NONE", rows(n, "b", 4, I32), "TRANSPOSE"
        ),
        "int32 isn't a floating-point type",
    ),
    "an inner size": (
        lambda n: n.add_matrix_multiply(rows(n, "a", 4), "NONE", n.add_input("b", F16, (5, 3)), ""),
        "sizes 4 and 5 differ",
    ),
    "a volume": (reshaped, "9 items for"),
    "an index": (lambda n: n.add_gather(rows(n, "a", 4), rows(n, "i", 1), 0), "an index is int32"),
    "a slice": (
        lambda n: n.add_slice(n.add_input("a", F16, (4,)), (2,), (3,), (1,)),
        r"2 \+ 3 of 4 items",
    ),
}


@pytest.mark.parametrize("what", WRONG)
def test_a_layer_that_does_not_fit_is_refused_by_its_name(what: str) -> None:
    make, problem = WRONG[what]
    layer = make(EmulatedNetwork())
    layer.name = "layers.0"
    with pytest.raises(BuildError, match=rf"layers\.0: .*{problem}"):
        layer.get_output(0)


def test_fp8_may_only_be_dequantised() -> None:
    network = EmulatedNetwork()
    codes = network.add_quantize(rows(network, "a", 4), constant(network, ONE, F32), DataType.fp8)
    fp8 = codes.get_output(0)
    with pytest.raises(BuildError, match="fp8 isn't a floating-point type"):
        network.add_matrix_multiply(fp8, "NONE", fp8, "TRANSPOSE").get_output(0)
    with pytest.raises(BuildError, match="fp8 may only be dequantised"):
        network.add_gather(fp8, rows(network, "i", 1, I32), 0).get_output(0)


def test_fp8_is_rounded_to_even_and_to_the_largest_number() -> None:
    network = EmulatedNetwork()
    x, scale = rows(network, "x", 4, F32), constant(network, np.array(0.5, np.float32), F32)
    codes = network.add_quantize(x, scale, DataType.fp8).get_output(0)
    made = network.add_dequantize(codes, scale, F32).get_output(0)
    made.name = "made"
    network.mark_output(made)
    values = np.array([[8.5, 9.5, 1e9, -1e9], [0.25, -(2.0**-11), 2.0**-11 * 3, 0]], np.float32)
    expected = [[8, 10, 224, -224], [0.25, 0, 2.0**-9, 0]]
    np.testing.assert_array_equal(network.run({"x": values})["made"], expected)


def sum_network() -> EmulatedNetwork:
    network = EmulatedNetwork()
    total = network.add_elementwise(rows(network, "a", 4), rows(network, "b", 4), "SUM")
    tensor = total.get_output(0)
    tensor.name = "total"
    network.mark_output(tensor)
    return network


@pytest.mark.parametrize("rows", [1, 2, 7])
def test_one_network_runs_for_many_sizes(rows: int) -> None:
    a = np.random.default_rng(0).standard_normal((rows, 4)).astype(np.float16)
    (total,) = sum_network().run({"a": a, "b": a}).values()
    assert total.dtype == np.float16
    assert (total == a + a).all()


@pytest.mark.parametrize(
    ("a", "b", "problem"),
    [
        (np.zeros((2, 4), np.float16), np.zeros((3, 4), np.float16), "not fp16"),
        (np.zeros((2, 5), np.float16), np.zeros((2, 4), np.float16), "not fp16"),
        (np.zeros((2, 4), np.float32), np.zeros((2, 4), np.float16), "float32"),
        (np.zeros(4, np.float16), np.zeros((2, 4), np.float16), r"\[4\], not fp16"),
    ],
)
def test_inputs_that_are_not_what_was_declared_are_refused(a: Any, b: Any, problem: str) -> None:
    with pytest.raises(InternalError, match=problem):
        sum_network().run({"a": a, "b": b})


def test_missing_inputs_are_named() -> None:
    with pytest.raises(InternalError, match="missing, or unknown: b"):
        sum_network().run({"a": np.zeros((1, 4), np.float16)})


def test_sizes_that_only_a_run_can_tell_are_checked_in_it() -> None:
    network = EmulatedNetwork()
    layer = network.add_shuffle(rows(network, "x", 6))
    layer.reshape_dims = (-1, 4)
    tensor = layer.get_output(0)
    tensor.name = "y"
    network.mark_output(tensor)
    assert network.run({"x": np.zeros((2, 6), np.float16)})["y"].shape == (3, 4)
    with pytest.raises((InternalError, RuntimeError)):
        network.run({"x": np.zeros((1, 6), np.float16)})


@pytest.mark.parametrize(
    ("dtype", "numpy"), [(F16, np.float16), (DataType.bfloat16, ml_dtypes.bfloat16)]
)
def test_every_layer_rounds_to_its_dtype(dtype: DataType, numpy: Any) -> None:
    """(a + b) - a, of which a sum that isn't rounded would give b back."""
    network = EmulatedNetwork()
    a, b = rows(network, "a", 1, dtype), rows(network, "b", 1, dtype)
    total = network.add_elementwise(a, b, "SUM").get_output(0)
    rest = network.add_elementwise(total, a, "SUB").get_output(0)
    rest.name = "rest"
    network.mark_output(rest)
    feeds = {"a": np.array([[4096.0]], numpy), "b": np.array([[1.5]], numpy)}
    expected = (feeds["a"] + feeds["b"]) - feeds["a"]
    assert network.run(feeds)["rest"] == expected
    assert expected != 1.5


def test_what_depends_on_constants_alone_is_computed_once() -> None:
    network = EmulatedNetwork()
    kept = np.array([[33, -8]], np.int8).repeat(2, 0), np.array(0.5, np.float32)
    codes, scale = constant(network, kept[0], DataType.int8), constant(network, kept[1], F32)
    weights = network.add_dequantize(codes, scale, F16).get_output(0)
    assert weights.value is not None
    assert weights.value.tolist() == [[16.5, -4.0]] * 2


def test_int4_weights_lie_low_half_first() -> None:
    network = EmulatedNetwork()
    values = np.array([0x21, 0xF8], np.uint8)
    weights = TRT.Weights(DataType.int4, values.ctypes.data, 4)
    tensor = network.add_constant((2, 2), weights).get_output(0)
    assert tensor.value is not None
    assert tensor.value.tolist() == [[1, 2], [-8, -1]]
