"""Occupancy by the CUDA occupancy calculator's rules, worked out by hand."""

import pytest

from llmbuild.builder.targets.gpu.capabilities import CAPABILITIES, capability, occupancy
from llmbuild.errors import BuildError


@pytest.mark.parametrize(
    ("sm", "registers", "shared_bytes", "num_warps", "expected"),
    [
        # 32 blocks are all that an SM takes: of one warp each, half its 64 warps.
        (80, 16, 0, 1, 32 / 64),
        (86, 16, 0, 1, 16 / 48),
        (89, 16, 0, 1, 24 / 48),
        # 32 registers x 32 threads = 1024 a warp; a quarter's 16384 hold 16 warps, 64 in all.
        (80, 32, 0, 8, 64 / 64),
        # 33 x 32 = 1056, so 1280 a warp: 12 warps a quarter, 48 in all, 6 blocks of 8.
        (80, 33, 0, 8, 48 / 64),
        (80, 40, 0, 8, 48 / 64),
        (80, 40, 0, 2, 48 / 64),  # though 65536 registers would do for 51
        # 41 x 32 = 1312, so 1536 a warp: 10 warps a quarter, 40 in all, 5 blocks of 8.
        (80, 41, 0, 8, 40 / 64),
        # 255 x 32 = 8160, so 8192 a warp: 2 warps a quarter, 8 in all: a block of 8, two of 4.
        (90, 255, 0, 8, 8 / 64),
        (90, 255, 0, 4, 8 / 64),
        (90, 255, 0, 16, 0.0),  # needs more registers than there are
        # 48 KB and the 1 KB that CUDA reserves: 164 // 49 = 3 blocks, 228 // 49 = 4, 100 // 49 = 2.
        (80, 32, 48 * 1024, 4, 12 / 64),
        (90, 32, 48 * 1024, 4, 16 / 64),
        (120, 32, 48 * 1024, 4, 8 / 48),
        # 19 KB + 1 KB goes five times into 100 KB; one byte more takes a unit of 128, and four.
        (86, 32, 19 * 1024, 4, 20 / 48),
        (86, 32, 19 * 1024 + 1, 4, 16 / 48),
        # 48 warps don't divide into blocks of 32.
        (120, 32, 0, 32, 32 / 48),
        (100, 32, 0, 32, 64 / 64),
    ],
)
def test_occupancy_is_that_of_the_scarcest_resource(
    sm: int, registers: int, shared_bytes: int, num_warps: int, expected: float
) -> None:
    assert occupancy(sm, registers, shared_bytes, num_warps) == pytest.approx(expected)


def test_unknown_sm_is_named_with_the_known_ones() -> None:
    with pytest.raises(BuildError, match=r"SM 75; known: 80, 86, 89, 90, 100, 120"):
        capability(75)


def test_newer_sms_never_take_older_ptx() -> None:
    blackwell = [CAPABILITIES[sm].ptx_version for sm in (100, 120)]
    assert min(blackwell) > max(known.ptx_version for sm, known in CAPABILITIES.items() if sm <= 90)
