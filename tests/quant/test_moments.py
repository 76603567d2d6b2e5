"""Second moments of inputs, against a loop in float64."""

import numpy as np
import torch

from llmbuild.quant.moments import input_moments


def test_moments_are_the_mean_of_outer_products_with_norms_limited() -> None:
    x = np.random.default_rng(0).standard_normal((51, 7))
    x[3] *= 500  # as a first token's
    x[9] = 0
    limit = 2 * np.median(np.linalg.norm(x, axis=1))
    want = np.zeros((7, 7))
    for row in x:
        norm = np.linalg.norm(row)
        if norm > limit:
            row = row * (limit / norm)
        want += np.outer(row, row) / len(x)
    got = input_moments(torch.tensor(x, dtype=torch.float32))
    np.testing.assert_allclose(got.numpy(), want, rtol=1e-4, atol=1e-6)
