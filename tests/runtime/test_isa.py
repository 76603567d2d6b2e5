"""ISA levels against the processors that the kernel describes."""

import platform
from pathlib import Path

import pytest

from llmbuild.errors import EngineError
from llmbuild.runtime.isa import LEVELS, missing_flags, processor_flags, supported_levels

# What Linux prints for five generations of processors, other features left out.
CORE2 = "cmov cx8 fpu fxsr mmx sse sse2 cx16 lahf_lm pni ssse3"
HASWELL = (
    CORE2 + " sse4_1 sse4_2 popcnt abm avx avx2 bmi1 bmi2 f16c fma movbe xsave constant_tsc rdrand"
)
ALDER_LAKE = HASWELL + " avx_vnni"
SKYLAKE_SP = HASWELL + " avx512f avx512dq avx512cd avx512bw avx512vl"
CASCADE_LAKE = SKYLAKE_SP + " avx512_vnni"


def cpuinfo(tmp_path: Path, *processors: str, key: str = "flags\t\t") -> Path:
    path = tmp_path / "cpuinfo"
    path.write_text(
        "\n".join(f"processor\t: {i}\n{key}: {flags}\n" for i, flags in enumerate(processors))
    )
    return path


@pytest.mark.parametrize(
    ("flags", "levels"),
    [
        (CORE2, ["x86-64"]),
        (HASWELL, ["x86-64-v3", "x86-64"]),
        (ALDER_LAKE, ["x86-64-v3-vnni", "x86-64-v3", "x86-64"]),
        (SKYLAKE_SP, ["x86-64-v4", "x86-64-v3", "x86-64"]),
        (CASCADE_LAKE, ["x86-64-v4-vnni", "x86-64-v4", "x86-64-v3", "x86-64"]),
        (SKYLAKE_SP.replace("avx512dq ", ""), ["x86-64-v3", "x86-64"]),
        ("", []),
    ],
)
def test_levels_of_an_x86_processor_are_best_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flags: str, levels: list[str]
) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    assert supported_levels(cpuinfo(tmp_path, flags)) == levels


def test_levels_of_an_arm_processor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    path = cpuinfo(tmp_path, "fp asimd evtstrm aes", key="Features\t")
    assert supported_levels(path) == ["aarch64"]


def test_a_machine_without_known_levels_supports_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "riscv64")
    assert supported_levels(cpuinfo(tmp_path, SKYLAKE_SP)) == []


def test_a_feature_counts_only_when_every_processor_has_it(tmp_path: Path) -> None:
    path = cpuinfo(tmp_path, SKYLAKE_SP, HASWELL, SKYLAKE_SP)
    assert processor_flags(path) == frozenset(HASWELL.split())


def test_missing_flags_are_what_the_level_adds(tmp_path: Path) -> None:
    path = cpuinfo(tmp_path, HASWELL)
    assert missing_flags("x86-64-v3", path) == []
    assert missing_flags("x86-64-v4", path) == [
        "avx512bw",
        "avx512cd",
        "avx512dq",
        "avx512f",
        "avx512vl",
    ]


def test_a_better_level_needs_all_that_a_worse_one_needs() -> None:
    base, v3, v4 = (LEVELS[name].flags for name in ("x86-64", "x86-64-v3", "x86-64-v4"))
    assert base < v3 < v4 < LEVELS["x86-64-v4-vnni"].flags
    assert v3 < LEVELS["x86-64-v3-vnni"].flags


def test_without_cpuinfo_the_error_says_what_is_needed(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="need Linux with /proc"):
        supported_levels(tmp_path / "absent")
