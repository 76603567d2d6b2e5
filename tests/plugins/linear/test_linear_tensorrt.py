"""The plugins of quantised_linear, launched as TensorRT would, against the torch reference."""

import numpy as np
import pytest
import torch
from plugin_contract import run
from quantised_matrices import random_matrix

from llmbuild.builder.targets.gpu.pack import pack
from llmbuild.plugins.common.weight_format import WeightFormat
from llmbuild.plugins.linear.op import quantised_linear as reference
from llmbuild.plugins.linear.tensorrt import quantise_rows, quantised_linear
from llmbuild.quant.grid import QuantisedMatrix

INT4, INT8 = WeightFormat("int4", 32), WeightFormat("int8", 0)
ZEROS = WeightFormat("int4", 32, "zeros")
# (tokens, features, columns): around tiles of 16 and 64 tokens and of 64 features.
SHAPES = [(1, 63, 64), (17, 65, 96), (5, 64, 32)]

# numpy's, of columns that a group hasn't
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


def parts_of(matrix: QuantisedMatrix) -> dict[str, torch.Tensor | None]:
    parts = vars(pack(matrix))
    parts["codes"] = parts["codes"].view(np.int8)
    return {name: None if part is None else torch.from_numpy(part) for name, part in parts.items()}


def expected(
    x: torch.Tensor,
    matrix: QuantisedMatrix,
    bias: torch.Tensor | None,
    group: int = 0,
    static: torch.Tensor | None = None,
) -> torch.Tensor:
    codes, scales, minima, zeros = (
        None if array is None else torch.from_numpy(array)
        for array in (matrix.codes, matrix.scales, matrix.minima, matrix.zeros)
    )
    zero = matrix.grid.zero
    return reference(x.float(), codes, scales, minima, bias, zero, group, zeros, static)


@pytest.mark.parametrize("tactic", [0, 1, 2])
@pytest.mark.parametrize("weights", [INT4, INT8, ZEROS], ids=lambda weights: weights.name)
@pytest.mark.parametrize("shape", SHAPES[:2])
def test_every_tactic_multiplies_any_number_of_tokens(
    shape: tuple[int, int, int], weights: WeightFormat, tactic: int
) -> None:
    tokens, features, columns = shape
    torch.manual_seed(1)
    matrix = random_matrix(weights, features, columns)
    x, bias = torch.randn(tokens, columns).half(), torch.randn(features)
    plugin = quantised_linear(80, weights, "fp16", (features, columns), has_bias=True)
    (y,) = run(plugin, tactic, x=x, bias=bias, **parts_of(matrix))
    target = expected(x, matrix, bias)
    assert (y.float() - target).abs().max() < 2e-3 * target.abs().max()


@pytest.mark.parametrize("tactic", [0, 1])
@pytest.mark.parametrize(("group", "is_static"), [(32, False), (96, False), (32, True)])
def test_activations_meet_codes_as_codes(group: int, is_static: bool, tactic: int) -> None:
    tokens, features, columns = SHAPES[1]
    torch.manual_seed(2)
    matrix = random_matrix(INT8, features, columns)
    x = torch.randn(tokens, columns).half()
    static = torch.linspace(0.01, 0.03, columns // group) if is_static else None
    rounding = quantise_rows(80, "fp16", columns, group, is_static)
    codes, scales = run(rounding, x=x, static_scales=static)
    plugin = quantised_linear(80, INT8, "fp16", (features, columns), False, group)
    (y,) = run(plugin, tactic, x=codes, x_scales=scales, **parts_of(matrix))
    target = expected(x, matrix, None, group, static)
    assert (y.float() - target).abs().max() < 2e-3 * target.abs().max()
