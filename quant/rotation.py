"""Rotations that spread outliers: every column of what is rotated becomes a mixture of all.

A grid's steps follow the largest weight of a group, and those of activations the largest of a row;
after such a rotation both are little larger than the others (Chee et al., "QuIP: 2-Bit Quantization
of Large Language Models With Guarantees", 2023; Ashkboos et al., "QuaRot", 2024).
"""

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]

_PART_ITEMS = 1 << 20  # rotated at a time


class Rotation:
    """R, orthogonal [size, size]: random signs, and then the Hartley transform, which exists for
    any size, as Hadamard's doesn't. The same for the same size."""

    def __init__(self, size: int) -> None:
        generator = np.random.default_rng(size)
        self._scaled_signs = generator.choice(np.array([-1, 1], np.float32), size)
        self._scaled_signs /= np.sqrt(np.float32(size))

    def columns(self, x: NDArray[np.generic]) -> Floats:
        """x R along the last axis, which holds `size` items, or several runs of as many."""
        size = len(self._scaled_signs)
        runs = x.reshape(-1, size)
        rotated = np.empty(runs.shape, np.float32)
        step = max(1, _PART_ITEMS // size)
        for begin in range(0, len(runs), step):
            part = runs[begin : begin + step].astype(np.float32)
            rotated[begin : begin + step] = _hartley(part * self._scaled_signs)
        return rotated.reshape(x.shape)

    def rows(self, x: NDArray[np.generic]) -> Floats:
        """R^T x along the last axis but one, likewise."""
        return np.ascontiguousarray(self.columns(x.swapaxes(-1, -2)).swapaxes(-1, -2))


def _hartley(x: Floats) -> Floats:
    """sum_j x_j (cos + sin)(2 pi j k / n) along the last axis: from Fourier's coefficients, of
    which those beyond the middle are the others' conjugates."""
    half = np.fft.rfft(x)
    transformed = np.empty_like(x)
    count = half.shape[-1]
    transformed[..., :count] = half.real - half.imag
    mirrored = half[..., 1 : x.shape[-1] - count + 1][..., ::-1]
    transformed[..., count:] = mirrored.real + mirrored.imag
    return transformed
