"""What rows rounded to int8 in groups must be, for kernels that give such."""

import numpy as np
from numpy.typing import NDArray


def assert_rounded_to_int8(
    codes: NDArray[np.int8],
    scales: NDArray[np.float32],
    values: NDArray[np.floating],
    tolerance: float,
    static_scales: NDArray[np.float32] | None = None,
) -> None:
    """codes [T, N] and scales [T, N / group] hold `values`, which the kernel knows within a
    relative `tolerance`, as well as int8 can."""
    rows, groups = scales.shape
    values = values.reshape(rows, groups, -1).astype(np.float64)
    codes = codes.reshape(values.shape)
    if static_scales is None:
        largest = np.abs(values).max(-1)
        np.testing.assert_allclose(scales, largest / 127, rtol=tolerance, atol=0)
        # The largest value has the largest code.
        assert (np.abs(codes).max(-1) == np.where(largest > 0, 127, 0)).all()
    else:
        np.testing.assert_array_equal(scales, np.broadcast_to(static_scales, scales.shape))
    steps = values / np.where(scales > 0, scales, 1)[..., None]
    assert (np.abs(codes) <= 127).all()
    np.testing.assert_array_less(np.abs(codes - steps.clip(-127, 127)), 0.5 + 127 * 2 * tolerance)
