"""Plans of SmolLM2-135M by the shipped recipe: each precision, and three ranks. The build holds the
network of each to the reference."""

from pathlib import Path

import pytest

from llmbuild.builder.compile import compile
from llmbuild.runtime.manifest import read_manifest
from llmbuild.runtime.plan_header import read_plan_header

pytestmark = pytest.mark.slow

FEW_TOKENS = ("limits.max_step_tokens=64",)  # of the steps that the network is held to
SCHEMES = {
    "fp16": (),
    "w4a16": ("quantisation={scheme: w4a16, method: rtn}",),
    "w8a8": (
        "quantisation={scheme: w8a8-static, rotation: true}",
        "calibration={data: text.txt, sequences: 8, length: 128}",
    ),
    "fp8": (
        "quantisation=fp8_w8a8",
        "calibration={data: text.txt, sequences: 8, length: 128}",
    ),
}
LARGEST_MB = {"fp16": 300, "w4a16": 190, "w8a8": 270, "fp8": 270}  # a table of 57 MB stays fp16


@pytest.fixture
def recipe(checkout: Path, tmp_path: Path) -> Path:
    """The shipped one, with a text beside it."""
    path = tmp_path / "recipe.yaml"
    path.write_text((checkout / "recipes" / "smollm2-135m-rtx.yaml").read_text())
    (tmp_path / "text.txt").write_text((checkout / "docs" / "decisions.md").read_text())
    return path


@pytest.mark.parametrize("scheme", SCHEMES)
def test_smollm2_builds_in_every_precision(recipe: Path, scheme: str) -> None:
    out = compile(recipe, recipe.parent / "engine", [*FEW_TOKENS, *SCHEMES[scheme]])
    header = read_plan_header(out / "rank0" / "engine.plan")
    assert header.capabilities == ("8.9", "12.0")
    print(f"{scheme}: {header.size_bytes / 1e6:.0f} MB")
    assert header.size_bytes < LARGEST_MB[scheme] * 1e6


def test_three_ranks_of_smollm2_build_with_collectives(recipe: Path) -> None:
    out = compile(recipe, recipe.parent / "engine", [*FEW_TOKENS, "parallel.tp=3"])
    for index, rank in enumerate(read_manifest(out).ranks):
        assert (rank.heads.count, rank.kv_heads.count) == (3, 1)
        content = (out / f"rank{index}" / "engine.plan").read_bytes()
        assert b"all_reduce.dist_collective" in content
