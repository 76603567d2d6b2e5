"""AWQ: columns that strong inputs meet are stretched before rounding, and their inputs shrunk by
as much, so that their rounding error weighs less.

Lin et al., "AWQ: Activation-aware Weight Quantization for LLM Compression and Acceleration", 2023.
"""

from collections.abc import Sequence

import torch

from llmbuild.quant.clipping import search_levels
from llmbuild.quant.grid import WeightGrid, row_parts
from llmbuild.quant.moments import energy

_EXPONENTS = tuple(step / 20 for step in range(20))
_SEARCHED_ROWS = 2048  # of a matrix, evenly spaced, that the search looks at


def search_stretch(
    matrices: Sequence[tuple[torch.Tensor, WeightGrid]], moments: torch.Tensor
) -> torch.Tensor:
    """What to multiply each column with, fp32 [columns], before the matrices are rounded.

    matrices: fp32 [rows, columns], all of the same inputs, and the grid of each.
    moments: fp32 [columns, columns], the sum of x x^T over the inputs x. The stretch is a
    power of the inputs' strength, the one whose rounded products are nearest.
    """
    strength = moments.diagonal().clamp(min=0).sqrt()
    best, best_loss = torch.ones_like(strength), float("inf")
    for exponent in _EXPONENTS:
        stretch = _normalised(strength.clamp(min=1e-4 * float(strength.max())) ** exponent)
        loss = sum(
            _loss(weights[:: -(-len(weights) // _SEARCHED_ROWS)], grid, moments, stretch)
            for weights, grid in matrices
        )
        if loss < best_loss:
            best, best_loss = stretch, loss
    return best


def _normalised(stretch: torch.Tensor) -> torch.Tensor:
    """Around 1, so that neither weights nor inputs leave their range."""
    spread = (stretch.max() * stretch.min()).sqrt()
    return stretch / spread if float(spread) > 0 else torch.ones_like(stretch)


def _loss(
    weights: torch.Tensor, grid: WeightGrid, moments: torch.Tensor, stretch: torch.Tensor
) -> float:
    """Squared error of the products, a row's mean."""
    importance, loss = moments.diagonal() / stretch.square(), 0.0
    for part in row_parts(tuple(weights.shape)):
        stretched = weights[part] * stretch
        levels = search_levels(stretched, grid, importance, shrinks=(1.0,))
        loss += energy(levels.nearest(stretched).div_(stretch).sub_(weights[part]), moments)
    return loss / len(weights)
