"""Rotations against matrices written out in float64."""

import numpy as np
import pytest

from llmbuild.quant.rotation import Rotation

SIZES = (1, 2, 3, 6, 7, 64, 97, 576)


def hartley(size: int) -> np.ndarray:
    angles = 2 * np.pi * np.outer(np.arange(size), np.arange(size)) / size
    return (np.cos(angles) + np.sin(angles)) / np.sqrt(size)


def written_out(size: int) -> np.ndarray:
    return Rotation(size).columns(np.eye(size)).astype(np.float64)


@pytest.mark.parametrize("size", SIZES)
def test_rotation_is_signs_and_the_hartley_transform_and_keeps_lengths(size: int) -> None:
    rotation = written_out(size)
    np.testing.assert_allclose(np.abs(rotation), np.abs(hartley(size)), atol=1e-6)
    np.testing.assert_allclose(rotation @ rotation.T, np.eye(size), atol=2e-6)


@pytest.mark.parametrize("size", SIZES)
def test_columns_and_rows_are_products_with_the_rotation(size: int) -> None:
    x = np.random.default_rng(0).standard_normal((2, size, 3 * size))
    rotation = written_out(size)
    runs = x.reshape(2, size, 3, size) @ rotation
    np.testing.assert_allclose(Rotation(size).columns(x), runs.reshape(x.shape), atol=1e-5)
    np.testing.assert_allclose(Rotation(size).rows(x), rotation.T @ x, atol=1e-5)


def test_signs_are_mixed_and_the_same_each_time() -> None:
    signs = np.sign(written_out(64) / hartley(64))[:, 0]
    assert 16 <= (signs > 0).sum() <= 48
    np.testing.assert_array_equal(written_out(64), written_out(64))
