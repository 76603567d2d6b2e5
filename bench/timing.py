"""How a time is taken: the median over samples that are each long against the clock."""

import statistics
from collections.abc import Callable

SAMPLE_S = 0.02  # the least that a sample takes
SAMPLES = 7


def median_seconds(sample: Callable[[int], float]) -> float:
    """The median of `sample(calls)`, which warms up and gives seconds of one of so many calls."""
    calls = 1
    while (estimate := sample(calls)) * calls < SAMPLE_S / 4:
        calls *= 4
    calls = max(1, round(SAMPLE_S / estimate))
    return statistics.median(sample(calls) for _ in range(SAMPLES))
