"""Second moments of inputs, against a loop in float64."""

import numpy as np
import torch

from llmbuild.quant.moments import DAMPING, FactoredMoments, energy, input_moments


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


def test_factored_moments_are_the_damped_ones_by_ascending_strength() -> None:
    x = np.random.default_rng(1).standard_normal((90, 37)) * np.linspace(2, 0.1, 37)
    moments = x.T @ x / len(x)
    factored = FactoredMoments.of(torch.tensor(moments, dtype=torch.float32))
    strengths = moments.diagonal()
    order = factored.order.numpy()
    assert (np.diff(strengths[order]) >= 0).all()
    np.testing.assert_allclose(factored.importance.numpy(), strengths, rtol=1e-6)
    feedback = factored.feedback.double().numpy()
    np.testing.assert_array_equal(np.triu(feedback, 1), 0)
    np.testing.assert_array_equal(feedback.diagonal(), 1)
    damped = moments + np.eye(37) * DAMPING * strengths.mean()
    factor = np.linalg.cholesky(damped[np.ix_(order, order)])
    np.testing.assert_allclose(feedback, factor / factor.diagonal(), atol=1e-5)


def test_energy_is_that_of_the_products_with_and_without_factors() -> None:
    rng = np.random.default_rng(2)
    x, rows = rng.standard_normal((200, 33)), rng.standard_normal((6, 33))
    moments = torch.tensor(x.T @ x / len(x), dtype=torch.float32)
    wanted = np.square(x @ rows.T).sum() / len(x)
    given = torch.tensor(rows, dtype=torch.float32)
    assert abs(energy(given, moments) / wanted - 1) < 1e-5
    assert abs(FactoredMoments.of(moments).energy(given) / wanted - 1) < 1e-5
    assert FactoredMoments.of(torch.zeros(33, 33)).energy(given) == 0


def test_moments_factored_from_inputs_are_those_of_their_moments() -> None:
    rng = np.random.default_rng(3)
    x = torch.tensor(rng.standard_normal((120, 37)) * rng.uniform(0.2, 3, 37), dtype=torch.float32)
    x[5] *= 300
    ours, theirs = FactoredMoments.of_inputs(x), FactoredMoments.of(input_moments(x))
    torch.testing.assert_close(ours.order, theirs.order)
    torch.testing.assert_close(ours.importance, theirs.importance)
    torch.testing.assert_close(ours.feedback, theirs.feedback, atol=1e-5, rtol=1e-4)
