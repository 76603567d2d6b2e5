"""The numbers of FP8's E4M3 as OCP's specification has them: a sign, four bits of exponent with
bias 7, three of mantissa; no infinities, and a NaN of either sign."""

from math import ldexp, nan

import numpy as np
from numpy.typing import NDArray

LARGEST = 448.0


def number(code: int) -> float:
    """What a byte stands for."""
    exponent, mantissa = code >> 3 & 15, code & 7
    if (exponent, mantissa) == (15, 7):
        return nan
    magnitude = ldexp(8 + mantissa, exponent - 10) if exponent else ldexp(mantissa, -9)
    return -magnitude if code >> 7 else magnitude


NUMBERS = np.array([number(code) for code in range(256)])
MAGNITUDES = NUMBERS[:127]  # from zero to the largest
BETWEEN = (MAGNITUDES[1:] + MAGNITUDES[:-1]) / 2  # the ties


def nearest(values: NDArray[np.float64]) -> NDArray[np.uint8]:
    """Codes by search over all numbers: of a tie the one whose mantissa is even; beyond the largest
    that one."""
    distances = np.abs(np.abs(values)[..., None] - MAGNITUDES)
    is_nearest = distances == distances.min(-1, keepdims=True)
    first = is_nearest.argmax(-1)
    is_tie = is_nearest.sum(-1) == 2
    return (first + (is_tie & (first % 2 == 1)) + 128 * np.signbit(values)).astype(np.uint8)
