"""The GPU kernels of quantised_linear against float64, in Triton's interpreter: fp32 and fp16
activations, int8 and e4m3 ones, and bf16 in the GEMV alone, since the interpreter's dots of bf16
are wrong. e4m3 weights both as bytes, as SM 80 and 86 decode them, and as the type."""

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from quantised_matrices import random_matrix
from triton_harness import launch

from llmbuild.builder.targets.gpu.pack import pack
from llmbuild.plugins.common.kernel_variant import JitFunction, KernelVariant
from llmbuild.plugins.common.weight_format import INT4, INT8, Q4_1, WeightFormat
from llmbuild.plugins.linear.gemm_triton import quantised_gemm
from llmbuild.plugins.linear.gemv_triton import quantised_gemv
from llmbuild.plugins.linear.triton import gemm_variant, gemv_variant

FORMATS = [
    WeightFormat("int4", 32),
    WeightFormat("int4", 64, "minima"),
    WeightFormat("int4", 96, "zeros"),
    WeightFormat("int4", 0, "minima"),
    WeightFormat("int8", 0),
    WeightFormat("int8", 32, "minima"),
    WeightFormat("int8", 64, "zeros"),
    WeightFormat("e4m3", 0),
    WeightFormat("e4m3", 64),
]
COLUMNS = 192
ROUNDING = 2.0**-18  # of a sum's terms

Kernel = JitFunction | KernelVariant


@dataclass(frozen=True)
class Weights:
    """exact: float64 [N, K]. terms: no less than what a kernel adds up for a column of 1."""

    format: WeightFormat
    arguments: dict[str, torch.Tensor | None]
    exact: NDArray[np.float64]
    terms: NDArray[np.float64]

    @property
    def words(self) -> dict[str, torch.Tensor | None]:
        """For the GEMV, which reads codes as words."""
        codes = self.arguments["codes"]
        assert codes is not None
        return {"words": codes.view(torch.int32)} | {
            name: part for name, part in self.arguments.items() if name != "codes"
        }

    @property
    def typed_e4m3(self) -> dict[str, torch.Tensor | None]:
        codes = self.arguments["codes"]
        assert codes is not None
        return self.arguments | {"codes": codes.view(torch.float8_e4m3fn)}


def random_weights(weights: WeightFormat, rows: int, columns: int = COLUMNS) -> Weights:
    if weights.numbers == "e4m3":
        return random_e4m3(weights, rows, columns)
    matrix = random_matrix(weights, rows, columns)
    arguments = {
        name: None if part is None else torch.from_numpy(part)
        for name, part in vars(pack(matrix)).items()
    }
    exact = matrix.dequantised().astype(np.float64)
    largest = np.float64(1 << weights.bits) * matrix.scales.max() + 2
    return Weights(weights, arguments, exact, np.full(exact.shape, largest))


def random_e4m3(weights: WeightFormat, rows: int, columns: int) -> Weights:
    """Every number but NaN."""
    rng = np.random.default_rng(rows)
    codes = rng.integers(0, 127, (rows, columns), np.uint8)
    codes |= rng.integers(0, 2, codes.shape, np.uint8) << np.uint8(7)
    groups = columns // weights.group if weights.group else 1
    scales = rng.uniform(0.001, 0.01, (rows, groups)).astype(np.float32)
    numbers = torch.from_numpy(codes).view(torch.float8_e4m3fn).double().numpy()
    exact = (numbers.reshape(rows, groups, -1) * scales[..., None]).reshape(rows, columns)
    arguments = {
        "codes": torch.from_numpy(codes),
        "scales": torch.from_numpy(scales),
        "minima": None,
        "zeros": None,
    }
    return Weights(weights, arguments, exact, np.abs(exact))


def random_bias(rows: int) -> NDArray[np.float32]:
    return np.random.default_rng(rows).standard_normal(rows).astype(np.float32)


def result_type(kernel: Kernel) -> torch.dtype:
    """fp32, and fp16 of a variant."""
    return torch.float16 if isinstance(kernel, KernelVariant) else torch.float32


def random_rows(rows: int, columns: int, dtype: torch.dtype) -> torch.Tensor:
    rng = np.random.default_rng([rows, columns])
    return torch.from_numpy(rng.standard_normal((rows, columns))).to(dtype)


def assert_linear(
    y: torch.Tensor,
    x: NDArray[np.float64],
    weights: Weights,
    bias: NDArray[np.float32] | None,
) -> None:
    exact, terms = x @ weights.exact.T, np.abs(x) @ weights.terms.T
    if bias is not None:
        exact, terms = exact + bias, terms + np.abs(bias)
    assert np.isfinite(y.numpy()).all()
    allowed = ROUNDING * terms + (np.abs(exact) * 2.0**-11 if y.dtype == torch.float16 else 0)
    assert (np.abs(y.double().numpy() - exact) <= allowed).all()


def run_gemv(
    x: torch.Tensor,
    weights: Weights,
    bias: NDArray[np.float32] | None = None,
    tokens: int = 1,
    features: int = 4,
    depth: int = 128,
    kernel: Kernel = quantised_gemv,
) -> torch.Tensor:
    rows, columns = x.shape
    outputs = len(weights.exact)
    y = torch.full((rows, outputs), torch.nan, dtype=result_type(kernel))
    launch(
        kernel,
        (-(-outputs // features),),
        x=x,
        **weights.words,
        bias=bias,
        tokens=rows,
        N=outputs,
        W=columns * weights.format.bits // 32,
        y=y,
        IS_E4M3=weights.format.numbers == "e4m3",
        **weights.format.constants,
        TOKENS=tokens,
        FEATURES=features,
        DEPTH=depth,
    )
    return y


def run_gemm(
    x: torch.Tensor,
    weights: Weights,
    arguments: dict[str, torch.Tensor | None] | None = None,
    bias: NDArray[np.float32] | None = None,
    x_scales: NDArray[np.float32] | None = None,
    x_group: int = 0,
    tokens: int = 16,
    features: int = 16,
    depth: int = 32,
    kernel: Kernel = quantised_gemm,
) -> torch.Tensor:
    rows, columns = x.shape
    outputs = len(weights.exact)
    y = torch.full((rows, outputs), torch.nan, dtype=result_type(kernel))
    launch(
        kernel,
        (-(-outputs // features), -(-rows // tokens)),
        x=x,
        x_scales=x_scales,
        **(arguments or weights.arguments),
        bias=bias,
        tokens=rows,
        N=outputs,
        K=columns,
        y=y,
        **weights.format.constants,
        X_GROUP=x_group,
        TOKENS=tokens,
        FEATURES=features,
        DEPTH=depth,
    )
    return y


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("weights", FORMATS, ids=lambda weights: weights.name)
def test_gemv_multiplies_dequantised_weights(weights: WeightFormat, dtype: torch.dtype) -> None:
    matrix = random_weights(weights, 7)
    x, bias = random_rows(1, COLUMNS, dtype), random_bias(7)
    assert_linear(run_gemv(x, matrix, bias), x.double().numpy(), matrix, bias)


@pytest.mark.parametrize(("rows", "tokens"), [(1, 1), (2, 2), (3, 4), (4, 4), (5, 8), (8, 8)])
@pytest.mark.parametrize(("columns", "outputs"), [(32, 3), (96, 4), (128, 5), (160, 1), (576, 5)])
def test_gemv_takes_any_number_of_tokens_and_features(
    columns: int, outputs: int, rows: int, tokens: int
) -> None:
    matrix = random_weights(WeightFormat("int4", 32, "minima"), outputs, columns)
    x = random_rows(rows, columns, torch.float16)
    y = run_gemv(x, matrix, tokens=tokens)
    assert_linear(y, x.double().numpy(), matrix, None)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("weights", FORMATS, ids=lambda weights: weights.name)
def test_gemm_multiplies_dequantised_weights(weights: WeightFormat, dtype: torch.dtype) -> None:
    matrix = random_weights(weights, 33)
    x, bias = random_rows(17, COLUMNS, dtype), random_bias(33)
    y = run_gemm(x, matrix, bias=bias)
    assert_linear(y, x.double().numpy(), matrix, bias)


@pytest.mark.parametrize(
    ("rows", "outputs"), [(1, 17), (15, 1), (16, 16), (17, 15), (33, 17), (33, 33)]
)
@pytest.mark.parametrize(("columns", "depth"), [(64, 64), (192, 64), (320, 64), (96, 32)])
def test_gemm_takes_any_number_of_tokens_and_features(
    columns: int, depth: int, outputs: int, rows: int
) -> None:
    matrix = random_weights(WeightFormat("int8", 0), outputs, columns)
    x = random_rows(rows, columns, torch.float16)
    assert_linear(run_gemm(x, matrix, depth=depth), x.double().numpy(), matrix, None)


@pytest.mark.parametrize("group", [0, 64])
def test_gemm_takes_e4m3_weights_as_the_type_too(group: int) -> None:
    matrix = random_weights(WeightFormat("e4m3", group), 17)
    x = random_rows(5, COLUMNS, torch.float16)
    y = run_gemm(x, matrix, matrix.typed_e4m3)
    assert_linear(y, x.double().numpy(), matrix, None)


@pytest.mark.parametrize("x_group", [0, 32, 64])
@pytest.mark.parametrize(
    "weights",
    [each for each in FORMATS if each.numbers != "e4m3" and each.group != 96],
    ids=lambda weights: weights.name,
)
def test_gemm_of_int8_activations_scales_whole_numbers(weights: WeightFormat, x_group: int) -> None:
    matrix = random_weights(weights, 17)
    rng = np.random.default_rng(x_group)
    codes = rng.integers(-127, 128, (18, COLUMNS)).astype(np.int8)
    shape = (len(codes), COLUMNS // (x_group or COLUMNS))
    scales = rng.uniform(0.001, 0.02, shape).astype(np.float32)
    y = run_gemm(torch.from_numpy(codes), matrix, x_scales=scales, x_group=x_group)
    x = codes.reshape(*shape, -1).astype(np.float64) * scales[..., None]
    assert_linear(y, x.reshape(codes.shape), matrix, None)


def test_gemm_of_e4m3_activations_and_weights() -> None:
    matrix = random_weights(WeightFormat("e4m3", 0), 17)
    x = random_rows(18, COLUMNS, torch.float32).to(torch.float8_e4m3fn)
    scales = np.linspace(0.01, 0.1, len(x), dtype=np.float32)[:, None]
    y = run_gemm(x, matrix, matrix.typed_e4m3, x_scales=scales)
    assert_linear(y, x.double().numpy() * scales, matrix, None)


@pytest.mark.parametrize("sm", [80, 100])
@pytest.mark.parametrize("weights", [INT4, INT8, Q4_1], ids=lambda weights: weights.name)
def test_kernels_are_right_as_they_are_built(weights: WeightFormat, sm: int) -> None:
    """Of a row that is shorter than what the GEMV reads at a time, or no multiple of it."""
    matrix = random_weights(weights, 67, 576)
    for tokens in (1, 4):
        gemv = gemv_variant(sm, weights, "fp16", tokens)
        x = random_rows(tokens, 576, torch.float16)
        y = run_gemv(x, matrix, features=gemv.constants["FEATURES"], kernel=gemv)
        assert_linear(y, x.double().numpy(), matrix, None)
    for is_many in (False, True):
        gemm = gemm_variant(sm, weights, "fp16", "fp16", is_many=is_many)
        tokens, features = gemm.constants["TOKENS"], gemm.constants["FEATURES"]
        x = random_rows(tokens + 1, 576, torch.float16)
        y = run_gemm(x, matrix, tokens=tokens, features=features, kernel=gemm)
        assert_linear(y, x.double().numpy(), matrix, None)


def test_scale_that_is_nan_reaches_its_own_row_alone() -> None:
    """How rounding to int8 tells of a NaN or an infinity."""
    matrix = random_weights(WeightFormat("int8", 0), 5)
    scales = np.full((3, COLUMNS // 64), 0.1, np.float32)
    scales[1, 2] = np.nan
    codes = torch.ones((3, COLUMNS), dtype=torch.int8)
    y = run_gemm(codes, matrix, x_scales=scales, x_group=64)
    np.testing.assert_array_equal(y.isnan().all(1), [False, True, False])
    assert y[[0, 2]].isfinite().all()
