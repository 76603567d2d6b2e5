"""`llmbuild plan` as a user meets it: the table, the file, and the engine that they lead to."""

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

RunLlmbuild = Callable[..., subprocess.CompletedProcess[str]]
# A head of 16 takes 32 bytes a token in bf16, 16 + 4 in int8, 8 + 4 in int4.
WIDE = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16}
SCHEME = "quantisation={scheme: w4a8, group_size: 32, method: rtn}"


@pytest.fixture(scope="module")
def recipe(
    tmp_path_factory: pytest.TempPathFactory, checkout: Path, save_tiny_llama: Callable[..., Path]
) -> Path:
    """Of a tiny model that is calibrated with a text, two of whose KV heads it decides itself."""
    recipe = save_tiny_llama(tmp_path_factory.mktemp("planned") / "source", **WIDE)
    text = (checkout / "tests" / "data" / "genesis.txt").read_text()
    (recipe.parent / "genesis.txt").write_text(text)
    content = yaml.safe_load(recipe.read_text())
    content |= {"precision": "bf16", "calibration": {"data": "genesis.txt", "sequences": 3}}
    content["kv_cache"]["overrides"] = [{"match": "layers.1.v.*", "dtype": "bf16"}]
    recipe.write_text(yaml.safe_dump(content))
    return recipe


Plan = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="module")
def plan(recipe: Path, run_llmbuild: RunLlmbuild) -> Plan:
    """plan(*arguments, name="plan.yaml"): writes a plan beside the recipe."""

    def run(*arguments: object, name: str = "plan.yaml") -> subprocess.CompletedProcess[str]:
        out = recipe.parent / name
        return run_llmbuild("plan", recipe, "--out", out, *arguments, OMP_NUM_THREADS="1")

    return run


@pytest.fixture(scope="module")
def mixed(plan: Plan) -> subprocess.CompletedProcess[str]:
    """A plan of both parts by ratios, in mixed.yaml."""
    asked = ("--kv-ratio", 0.7, "--weight-ratio", 0.45, "--set", SCHEME)
    done = plan(*asked, name="mixed.yaml")
    assert done.returncode == 0, done.stderr
    return done


def written(recipe: Path, name: str) -> dict[str, Any]:
    return dict(yaml.safe_load((recipe.parent / name).read_text()))


def test_plan_is_within_the_ratios_and_tells_what_was_measured(
    recipe: Path, mixed: subprocess.CompletedProcess[str]
) -> None:
    content = written(recipe, "mixed.yaml")
    matches = [row["match"] for row in content["kv_cache"]]
    assert matches == ["layers.0.k.*", "layers.0.v.*", "layers.1.k.*"]
    figures = content["measured"]
    assert figures["tokens"] == {"sequences": 3, "length": 64, "scored": 192}
    for part, ratio in (("kv_cache", 0.7), ("quantisation", 0.45)):
        assert figures[part]["ratio"] <= ratio
        assert 0 < figures[part]["expected_kl_nats"] < 1
        assert 0 < figures[part]["measured_kl_nats"] < 1
    by_item = figures["quantisation"]["kl_nats"]
    assert list(by_item["embed.weight"]) == ["none", "w8a8", "w4a8"]
    for each in by_item.values():
        assert each["none"] == 0 < each["w8a8"] < each["w4a8"]
    *lines, path = mixed.stdout.splitlines()
    assert path == str(recipe.parent / "mixed.yaml")
    for start in (*matches, *by_item, "KV cache: 176 bytes a token, 68.75% of", "weights: "):
        assert any(line.startswith(start) for line in lines), start


@pytest.mark.slow
def test_engine_of_the_plan_is_as_small_as_was_told(
    tmp_path: Path,
    recipe: Path,
    mixed: subprocess.CompletedProcess[str],
    run_llmbuild: RunLlmbuild,
) -> None:
    content, out = written(recipe, "mixed.yaml"), tmp_path / "engine"
    compiled = run_llmbuild(
        "compile", recipe, "-o", out, "--set", SCHEME, "--set", "plan=mixed.yaml"
    )
    assert compiled.returncode == 0, compiled.stderr
    told = json.loads(run_llmbuild("inspect", out, "--json").stdout)
    figures = content["measured"]["kv_cache"]
    assert told["derived"]["kv_bytes_per_token"] == figures["bytes_a_token"]
    kept = yaml.safe_load((out / "recipe.yaml").read_text())
    assert "plan" not in kept
    own = [{"match": "layers.1.v.*", "dtype": "bf16"}]
    assert kept["kv_cache"]["overrides"] == own + content["kv_cache"]


def test_heads_are_chosen_one_by_one_for_a_kl(recipe: Path, plan: Plan) -> None:
    done = plan("--kv-max-kl", 0.001, "--per-head", "--sequences", 1)
    assert done.returncode == 0, done.stderr
    content = written(recipe, "plan.yaml")
    assert "quantisation" not in content
    assert [row["match"] for row in content["kv_cache"]] == [
        f"layers.{part}.{head}" for part in ("0.k", "0.v", "1.k") for head in (0, 1)
    ]
    figures = content["measured"]["kv_cache"]
    assert figures["expected_kl_nats"] <= 0.001
    assert figures["ratio"] < 1
    assert content["measured"]["tokens"]["sequences"] == 1


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), "give what to aim at: --kv-ratio"),
        (("--kv-ratio", 0.5, "--kv-max-kl", 1), "--kv-ratio or --kv-max-kl, not both"),
        (("--kv-ratio", 1.5), "1.5 is not in the range"),
        (("--kv-ratio", "nan"), "nan is not a number"),
        (("--weight-max-kl", "nan"), "nan is not a number"),
        (("--weight-max-kl", 1, "--per-head"), "--per-head needs --kv-ratio"),
        (("--weight-ratio", 0.5), "quantisation.scheme: given none; allowed: w4a8"),
        (("--weight-ratio", 0.5, "--set", "quantisation=fp8_w8a8"), "given fp8_w8a8; on cpu there"),
        (("--kv-ratio", 0.4), "--kv-ratio: given 0.4, and the smallest precisions"),
        (
            ("--kv-ratio", 0.5, "--set", "kv_cache.overrides=[{match: '*', dtype: int8}]"),
            "the recipe's own overrides decide everything",
        ),
        (("--kv-ratio", 0.5, "--out", "absent/plan.yaml"), "--out: given absent/plan.yaml"),
    ],
)
def test_what_can_not_be_planned_is_refused(
    arguments: tuple[object, ...],
    said: str,
    plan: Plan,
) -> None:
    done = plan(*arguments, name="refused.yaml")
    assert done.returncode == 2, done.stderr
    assert said in done.stderr
    assert "Traceback" not in done.stderr
