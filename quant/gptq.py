"""GPTQ: columns are rounded one after the other, and the columns that are left make up for each
one's error as far as the inputs allow.

Frantar et al., "GPTQ: Accurate Post-Training Quantization for Generative Pre-trained
Transformers", 2022; columns go in descending order of their inputs' strength ("act-order"). In the
form of Chee et al., "QuIP", 2023, which is the same rounding without an inverse: what a column has
to make up for follows from the errors before it and a factor of the moments.
"""

import numpy as np
import torch
from numpy.typing import NDArray

from llmbuild.quant.clipping import Levels, put_rows, search_levels
from llmbuild.quant.grid import QuantisedMatrix, WeightGrid, empty_matrix, row_parts
from llmbuild.quant.moments import FactoredMoments

_BLOCK = 64  # columns that earlier errors are carried to together


def gptq(
    values: NDArray[np.generic], moments: FactoredMoments, grid: WeightGrid
) -> QuantisedMatrix:
    """The matrix whose product with the inputs is nearest to that of `values`.

    values: [rows, columns] of any float type. moments: of the inputs.
    """
    matrix = empty_matrix(grid, values.shape)
    for part in row_parts(values.shape):
        weights = torch.from_numpy(values[part].astype(np.float32))
        levels = search_levels(weights, grid, moments.importance)
        put_rows(matrix, part, _round(weights, levels, moments), levels)
    return matrix


def _round(weights: torch.Tensor, levels: Levels, moments: FactoredMoments) -> torch.Tensor:
    """Codes, uint8 [rows, columns]. The factor's last column comes first."""
    rows, columns = weights.shape
    width = columns // levels.scales.shape[1]
    groups = [levels.of_group(group) for group in range(levels.scales.shape[1])]
    order, feedback = moments.order.tolist(), moments.feedback
    exact = weights.T[moments.order]  # a column of the matrix in a row, in order
    errors = torch.empty_like(exact)
    codes = torch.empty((columns, rows), dtype=torch.uint8)
    for end in range(columns, 0, -_BLOCK):
        begin = max(0, end - _BLOCK)
        block = torch.addmm(exact[begin:end], feedback[end:, begin:end].T, errors[end:])
        for i in reversed(range(begin, end)):
            group, column = groups[order[i] // width], order[i]
            rounded = group.round(block[i - begin])
            codes[column] = rounded
            torch.sub(exact[i], group.values(rounded), out=errors[i])
            block[: i - begin].addr_(feedback[i, begin:i], errors[i])
    return codes.T
