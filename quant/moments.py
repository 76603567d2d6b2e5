"""Second moments of a linear's inputs: what its weights' errors are weighed with."""

import torch

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
