"""Second moments of a linear's inputs: what its weights' errors are weighed with."""

import torch

DAMPING = 0.01  # added to the factored moments' diagonal, relative to its mean
_STRONGEST = 2.0  # of a row's norm, relative to the median


def input_moments(x: torch.Tensor) -> torch.Tensor:
    """The mean of x x^T over rows, fp32 [columns, columns]; x: fp32 [rows, columns].

    A row's norm counts at most _STRONGEST times the median: the first tokens of a sequence are
    hundreds of times stronger in some layers (Sun et al., "Massive Activations in Large Language
    Models", 2024), and would alone decide.
    """
    norms = torch.linalg.vector_norm(x, dim=1, keepdim=True)
    limit = _STRONGEST * norms.median()
    capped = x * (limit / norms.clamp(min=1e-30)).clamp(max=1)
    return capped.T @ capped / len(x)


class FactoredMoments:
    """Moments M as L L^T = M + damping: one matrix beside them while they are factored, and none
    afterwards.

    order: columns by ascending strength, in which L is lower triangular. importance: M's diagonal,
    the columns in their own order. feedback: fp32, L with each column divided by its diagonal.
    """

    def __init__(self, moments: torch.Tensor) -> None:
        self.importance = moments.diagonal().clone()
        self.order = self.importance.argsort(descending=True, stable=True).flip(0)
        factor = moments[self.order[:, None], self.order]
        strength = float(self.importance.mean())
        self._damping = DAMPING * strength if strength > 0 else 1.0
        factor.diagonal().add_(self._damping)
        # LAPACK's matrices are column-major: of one that is symmetric, this is the same memory.
        self.feedback = torch.linalg.cholesky(factor.mT, out=factor.mT)
        self._diagonal = self.feedback.diagonal().clone()
        self.feedback /= self._diagonal

    def energy(self, rows: torch.Tensor) -> float:
        """The sum of w M w^T over rows w [rows, columns]."""
        products = (rows[:, self.order] @ self.feedback).mul_(self._diagonal)
        return max(
            0.0, float(products.square_().sum()) - self._damping * float(rows.square().sum())
        )


def energy(rows: torch.Tensor, moments: torch.Tensor) -> float:
    """The sum of w M w^T over rows w [rows, columns], of moments M."""
    return float((rows @ moments).mul_(rows).sum())
