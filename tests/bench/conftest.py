"""Makes the benchmarks, which no install has, and fakes importable, and keeps them short."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2]))
sys.path.insert(0, str(Path(__file__).parent))

from bench import kernels, machine, timing


@pytest.fixture(scope="module", autouse=True)
def short_samples() -> Iterator[None]:
    """Times too short to mean anything."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(timing, "SAMPLE_S", 1e-5)
        patch.setattr(timing, "SAMPLES", 3)
        patch.setattr(kernels, "COLD_BYTES", 1 << 20)
        patch.setattr(machine, "READ_SIZES", dict.fromkeys(machine.READ_SIZES, 1 << 20))
        yield
