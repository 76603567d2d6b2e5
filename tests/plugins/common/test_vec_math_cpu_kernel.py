import numpy as np
import pytest
import torch
from kernel_harness import EACH_VECTOR_LEVEL, KernelCompiler, Library, bits

FUNCTIONS = ("sigmoid", "tanh", "erf", "absolute")

SOURCE = '#include "common/vec_math.h"\n' + "".join(
    f"""
extern "C" void {name}_of(const float* from, float* to, int count) {{
  for (int i = 0; i < count; i += kLanes) store(to + i, {name}(load(from + i)));
}}
"""
    for name in FUNCTIONS
)


@pytest.fixture(scope="module", params=EACH_VECTOR_LEVEL)
def library(request: pytest.FixtureRequest, compiler: KernelCompiler) -> Library:
    return compiler.library(SOURCE, request.param)


def apply(library: Library, name: str, values: np.ndarray) -> np.ndarray:
    padded = np.resize(values, -(-len(values) // 16) * 16)
    result = np.empty_like(padded)
    library.call(f"{name}_of", padded, result, len(padded))
    return result[: len(values)]


def sample_values() -> np.ndarray:
    """Finite floats of every magnitude, and more where the functions bend."""
    patterns = np.arange(0, 0x7F800000, 9973, dtype=np.uint32).view(np.float32)
    bends = np.linspace(0, 12, 1 << 17).astype(np.float32)
    return np.concatenate([patterns, -patterns, bends, -bends])


@pytest.mark.parametrize(("name", "ulps"), [("sigmoid", 2.5), ("tanh", 1.5), ("erf", 1.5)])
def test_function_is_within_a_few_ulp_of_float64(library: Library, name: str, ulps: float) -> None:
    values = sample_values()
    if name == "sigmoid":
        values = values[values > -87]  # further down its values leave the normal floats
    exact = getattr(torch, name)(torch.from_numpy(values.astype(np.float64))).numpy()
    ulp = np.spacing(np.abs(exact).astype(np.float32)).astype(np.float64)
    assert (np.abs(apply(library, name, values) - exact) / ulp).max() < ulps


@pytest.mark.parametrize("name", FUNCTIONS)
def test_special_values_map_as_in_torch(library: Library, name: str) -> None:
    values = np.array([0.0, -0.0, np.inf, -np.inf, 1e30, -1e30, np.nan], np.float32)
    expected = getattr(torch, name)(torch.from_numpy(values)).numpy()
    result = apply(library, name, values)
    np.testing.assert_array_equal(bits(result[:-1]), bits(expected[:-1]))
    assert np.isnan(result[-1])


def test_sigmoid_of_very_negative_values_is_below_the_smallest_normal(library: Library) -> None:
    values = np.linspace(-200, -87.5, 64).astype(np.float32)
    result = apply(library, "sigmoid", values)
    assert ((result >= 0) & (result < np.finfo(np.float32).tiny)).all()
