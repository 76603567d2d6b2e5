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
    capped = _capped(x)
    return (capped.T @ capped).div_(len(x))


class FactoredMoments:
    """Moments M as L L^T = M + damping.

    order: columns by ascending strength, in which L is lower triangular. importance: M's diagonal,
    the columns in their own order. feedback: fp32, L with each column divided by its diagonal.
    """

    def __init__(
        self, ordered: torch.Tensor, order: torch.Tensor, importance: torch.Tensor
    ) -> None:
        """ordered: M with rows and columns in this order, which is overwritten."""
        self.order, self.importance = order, importance
        strength = float(importance.mean())
        self._damping = DAMPING * strength if strength > 0 else 1.0
        ordered.diagonal().add_(self._damping)
        # LAPACK's matrices are column-major: of one that is symmetric, this is the same memory.
        self.feedback = torch.linalg.cholesky(ordered.mT, out=ordered.mT)
        self._diagonal = self.feedback.diagonal().clone()
        self.feedback /= self._diagonal

    @classmethod
    def of(cls, moments: torch.Tensor) -> "FactoredMoments":
        """Of moments as input_moments gives them, which stay as they are."""
        importance = moments.diagonal().clone()
        order = _ascending(importance)
        return cls(moments[order[:, None], order], order, importance)

    @classmethod
    def of_inputs(cls, x: torch.Tensor) -> "FactoredMoments":
        """Those of input_moments(x), but only one matrix of their size is ever held."""
        capped = _capped(x)
        importance = capped.square().mean(0)
        order = _ascending(importance)
        capped = capped[:, order]
        return cls((capped.T @ capped).div_(len(x)), order, importance)

    def energy(self, rows: torch.Tensor) -> float:
        """The sum of w M w^T over rows w [rows, columns]."""
        products = (rows[:, self.order] @ self.feedback).mul_(self._diagonal)
        return max(
            0.0, float(products.square_().sum()) - self._damping * float(rows.square().sum())
        )


def energy(rows: torch.Tensor, moments: torch.Tensor) -> float:
    """The sum of w M w^T over rows w [rows, columns], of moments M."""
    return float((rows @ moments).mul_(rows).sum())


def _capped(x: torch.Tensor) -> torch.Tensor:
    """Rows with their norms limited."""
    norms = torch.linalg.vector_norm(x, dim=1, keepdim=True)
    limit = _STRONGEST * norms.median()
    return x * (limit / norms.clamp(min=1e-30)).clamp(max=1)


def _ascending(importance: torch.Tensor) -> torch.Tensor:
    return importance.argsort(descending=True, stable=True).flip(0)
