"""What pools of the reference keep of a value."""

import math

import numpy as np
import torch
from e4m3 import LARGEST, NUMBERS, nearest

from llmbuild.plugins.common.kv_pools import kept


def test_fp8_is_the_nearest_number_of_e4m3() -> None:
    rng = np.random.default_rng(0)
    spread = rng.standard_normal(4000) * np.exp2(rng.uniform(-12, 10, 4000))
    ties = (NUMBERS[:126] + NUMBERS[1:127]) / 2
    values = np.concatenate([spread, ties, -ties]).astype(np.float32)
    expected = NUMBERS[nearest(values.astype(np.float64))]
    np.testing.assert_array_equal(kept(torch.from_numpy(values)[None], ["fp8"])[0], expected)


def test_fp8_keeps_what_is_beyond_its_largest_as_that_and_no_infinity() -> None:
    values = torch.tensor([[500.0, -1e30, math.inf, -math.inf, math.nan]])
    largest = [LARGEST, -LARGEST, *[math.nan] * 3]
    np.testing.assert_array_equal(kept(values, ["fp8"])[0], largest)
