import ml_dtypes
import numpy as np
import pytest
from kernel_harness import EACH_VECTOR_LEVEL, KernelCompiler, Library, bits

SOURCE = """
#include "common/dtype.h"
extern "C" void widen_scalar(const bf16* from, float* to, int count) {
  for (int i = 0; i < count; ++i) to[i] = to_float(from[i]);
}
extern "C" void widen_vector(const bf16* from, float* to, int count) {
  for (int i = 0; i < count; i += kLanes) store(to + i, load(from + i));
}
extern "C" void widen_fp16_scalar(const fp16* from, float* to, int count) {
  for (int i = 0; i < count; ++i) to[i] = to_float(from[i]);
}
extern "C" void widen_fp16_vector(const fp16* from, float* to, int count) {
  for (int i = 0; i < count; i += kLanes) store(to + i, load(from + i));
}
extern "C" void widen_first(const bf16* from, float* to, int count) {
  store(to, load_first(from, count));
}
extern "C" void narrow(const float* from, bf16* to, int count) {
  for (int i = 0; i < count; ++i) to[i] = from_float<bf16>(from[i]);
}
extern "C" void exponentials(const float* from, float* to, int count) {
  for (int i = 0; i < count; i += kLanes) store(to + i, exp(load(from + i)));
}
extern "C" void lane_reductions(const float* from, float* to) {
  to[0] = lane_sum(load(from));
  to[1] = lane_maximum(load(from));
  to[2] = front(load(from));
}
extern "C" void splat_lanes(float value, float* to) { store(to, splat(value)); }
extern "C" void store_first_lanes(const float* from, float* to, int count) {
  store_first(to, load(from), count);
}
"""


@pytest.fixture(scope="module", params=EACH_VECTOR_LEVEL)
def library(request: pytest.FixtureRequest, compiler: KernelCompiler) -> Library:
    return compiler.library(SOURCE, request.param)


@pytest.mark.parametrize("function", ["widen_scalar", "widen_vector"])
def test_every_bf16_widens_to_the_float_of_the_same_value(library: Library, function: str) -> None:
    patterns = np.arange(65536, dtype=np.uint16).view(ml_dtypes.bfloat16)
    widened = np.empty(65536, np.float32)
    library.call(function, patterns, widened, 65536)
    np.testing.assert_array_equal(bits(widened), np.arange(65536, dtype=np.uint32) << 16)


@pytest.mark.parametrize("function", ["widen_fp16_scalar", "widen_fp16_vector"])
def test_every_fp16_widens_to_the_float_of_the_same_value(library: Library, function: str) -> None:
    values = np.arange(65536, dtype=np.uint16).view(np.float16)
    widened = np.empty(65536, np.float32)
    library.call(function, values, widened, 65536)
    nan = np.isnan(values)
    assert np.isnan(widened[nan]).all()
    np.testing.assert_array_equal(bits(widened[~nan]), bits(values[~nan].astype(np.float32)))


def test_partial_load_reads_only_the_lanes_asked_for(library: Library) -> None:
    values = np.arange(1, 17).astype(ml_dtypes.bfloat16)
    for count in range(17):
        lanes = np.full(16, 9, np.float32)
        library.call("widen_first", values[:count].copy(), lanes, count)
        expected = [*range(1, count + 1), *[0] * (16 - count)]
        np.testing.assert_array_equal(lanes, expected)


def test_partial_store_writes_only_the_lanes_asked_for(library: Library) -> None:
    values = np.arange(1, 17, dtype=np.float32)
    for count in range(17):
        lanes = np.zeros(16, np.float32)
        library.call("store_first_lanes", values, lanes, count)
        np.testing.assert_array_equal(lanes, [*range(1, count + 1), *[0] * (16 - count)])


def test_rounding_to_bf16_is_to_nearest_even_as_in_ml_dtypes(library: Library) -> None:
    rng = np.random.default_rng(0)
    upper = np.arange(65536, dtype=np.uint32) << 16
    ties = [upper | low for low in (0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF)]
    random = rng.integers(0, 2**32, 200_000, dtype=np.uint32)
    values = np.concatenate([*ties, random]).view(np.float32)
    rounded = np.empty(len(values), ml_dtypes.bfloat16)
    library.call("narrow", values, rounded, len(values))
    nan = np.isnan(values)
    with np.errstate(invalid="ignore"):
        expected = values.astype(ml_dtypes.bfloat16)
    assert np.isnan(rounded[nan].astype(np.float32)).all()
    np.testing.assert_array_equal(bits(rounded[~nan]), bits(expected[~nan]))


def test_exp_is_within_two_ulp_of_float64(library: Library) -> None:
    rng = np.random.default_rng(1)
    values = np.concatenate(
        [np.linspace(-87.3, 88.7, 1 << 18), rng.uniform(-1, 1, 1 << 18), rng.normal(0, 1e-4, 1024)]
    ).astype(np.float32)
    result = np.empty_like(values)
    library.call("exponentials", values, result, len(values))
    exact = np.exp(values.astype(np.float64))
    ulp = np.spacing(exact.astype(np.float32)).astype(np.float64)
    assert (np.abs(result - exact) / ulp).max() < 2.0


def test_exp_underflows_through_subnormals_and_keeps_special_values(library: Library) -> None:
    values = np.zeros(16, np.float32)
    values[:9] = [-np.inf, -1e30, -104.0, -95.0, 0.0, 89.0, 1e30, np.inf, np.nan]
    result = np.empty_like(values)
    library.call("exponentials", values, result, 16)
    np.testing.assert_array_equal(result[[0, 1, 2, 4]], [0, 0, 0, 1])
    assert abs(result[3] - np.exp(-95.0)) <= 2.0**-149
    assert np.isposinf(result[5:8]).all()
    assert np.isnan(result[8])


def test_lane_reductions_take_every_lane(library: Library) -> None:
    for lane in range(16):
        values = np.full(16, -2.0, np.float32)
        values[lane] = 5.0
        result = np.empty(3, np.float32)
        library.call("lane_reductions", values, result)
        np.testing.assert_array_equal(result, [-25.0, 5.0, values[0]])


def test_splat_keeps_the_sign_of_zero(library: Library) -> None:
    for value in (-0.0, 0.0, -1.5, float("inf")):
        lanes = np.empty(16, np.float32)
        library.call("splat_lanes", value, lanes)
        np.testing.assert_array_equal(bits(lanes), bits(np.full(16, value, np.float32)))
