"""GPTQ: columns are rounded one after the other, and the columns that are left make up for each
one's error as far as the inputs allow.

Frantar et al., "GPTQ: Accurate Post-Training Quantization for Generative Pre-trained
Transformers", 2022; columns go in descending order of their inputs' strength ("act-order").
"""

import numpy as np
import torch
from numpy.typing import NDArray

from llmbuild.quant.clipping import Levels, put_rows, search_levels
from llmbuild.quant.grid import QuantisedMatrix, WeightGrid, empty_matrix, row_parts

DAMPING = 0.01  # added to the moments' diagonal, relative to its mean
_BLOCK = 64  # columns whose errors are carried to the later ones together


def gptq(values: NDArray[np.generic], moments: torch.Tensor, grid: WeightGrid) -> QuantisedMatrix:
    """The matrix whose product with the inputs is nearest to that of `values`.

    values: [rows, columns] of any float type. moments: fp32 [columns, columns], the sum of x x^T
    over the inputs x.
    """
    order = torch.argsort(moments.diagonal(), descending=True, stable=True)
    carry = _carry(moments, order)
    matrix = empty_matrix(grid, values.shape)
    for part in row_parts(values.shape):
        weights = torch.from_numpy(values[part].astype(np.float32))
        levels = search_levels(weights, grid, moments.diagonal())
        put_rows(matrix, part, _round(weights, levels, carry, order), levels)
    return matrix


def _carry(moments: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    """U, upper triangular, with U^T U the inverse of the damped moments in this order: an error
    in column i is made up for by -U[i, j] / U[i, i] times as much in column j.

    The moments are V V^T with V, upper triangular, the inverse of U: a Cholesky factor from the
    other end.
    """
    backward = order.flip(0)
    reversed_moments = moments[backward][:, backward]
    diagonal = reversed_moments.diagonal()
    strength = float(diagonal.mean())
    diagonal += DAMPING * strength if strength > 0 else 1.0
    factor = torch.linalg.cholesky(reversed_moments).flip(0, 1)
    return torch.linalg.solve_triangular(factor, torch.eye(len(order)), upper=True)


def _round(
    weights: torch.Tensor, levels: Levels, carry: torch.Tensor, order: torch.Tensor
) -> torch.Tensor:
    """Codes, uint8 [rows, columns]."""
    rows, columns = weights.shape
    width = columns // levels.scales.shape[1]
    groups = [levels.of_group(group) for group in range(levels.scales.shape[1])]
    left = weights.T[order]  # what is left to round, a column of the matrix in a row, in order
    codes = torch.empty((columns, rows), dtype=torch.uint8)
    for begin in range(0, columns, _BLOCK):
        end = min(columns, begin + _BLOCK)
        block, errors = left[begin:end], torch.empty(end - begin, rows)
        for i, column in enumerate(order[begin:end].tolist()):
            group, row = groups[column // width], carry[begin + i, begin + i : end]
            rounded = group.round(block[i])
            codes[column] = rounded
            torch.sub(block[i], group.values(rounded), out=errors[i]).div_(row[0])
            block[i:].addr_(row, errors[i], alpha=-1)
        left[end:].addmm_(carry[begin:end, end:].T, errors, alpha=-1)
    return codes.T
