"""A recipe's gate holds a whole build: it passes and is kept in the report, or nothing is
published and every figure is said."""

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

RunLlmbuild = Callable[..., subprocess.CompletedProcess[str]]
QUANTISED = ("--set", "quantisation=w8a8", "--set", "kv_cache.dtype=int8")


@pytest.fixture
def build(
    tmp_path: Path, checkout: Path, save_tiny_llama: Callable[..., Path], run_llmbuild: RunLlmbuild
) -> Callable[..., subprocess.CompletedProcess[str]]:
    """build(gate, *overrides): compiles the tiny model, whose text lies beside its recipe."""
    recipe = save_tiny_llama(tmp_path / "source", hidden_size=64, intermediate_size=96, head_dim=16)
    text = (checkout / "tests" / "data" / "genesis.txt").read_text()
    (recipe.parent / "genesis.txt").write_text(text)

    def run(gate: str, *overrides: str) -> subprocess.CompletedProcess[str]:
        out = tmp_path / "engines" / "out"
        return run_llmbuild("compile", recipe, "-o", out, *overrides, "--set", f"gate={gate}")

    return run


def test_impossible_gate_publishes_nothing_and_says_every_figure(
    tmp_path: Path, build: Callable[..., subprocess.CompletedProcess[str]]
) -> None:
    sizes = "text: genesis.txt, context: 31, windows: 5"
    gate = f"{{compare: {{{sizes}, max_kl: 0}}, perplexity: {{{sizes}, max_increase: 9.0}}}}"
    done = build(gate, *QUANTISED)
    assert done.returncode == 2, done.stderr
    said = done.stderr[done.stderr.index("Error: ") :]
    assert "nothing was published" in said
    for figure in (
        "perplexity increase",
        "at most 9 is allowed (",
        "KL in nats a token",
        "at most 0 is allowed: FAILED (5 windows of 31 tokens of genesis.txt)",
        "token agreement",
    ):
        assert figure in said
    assert "Traceback" not in done.stderr
    assert list((tmp_path / "engines").iterdir()) == []


@pytest.mark.slow
def test_engine_that_passes_its_gate_is_published_alone(
    tmp_path: Path, build: Callable[..., subprocess.CompletedProcess[str]]
) -> None:
    done = build("{compare: {text: genesis.txt, windows: 5, min_agreement: 0.1}}", *QUANTISED)
    assert done.returncode == 0, done.stderr
    assert [path.name for path in (tmp_path / "engines").iterdir()] == ["out"]
    assert "token agreement" in done.stderr
    assert "gate:" in (tmp_path / "engines" / "out" / "recipe.yaml").read_text()


def test_gate_is_refused_before_the_build_where_it_can_not_be_held_to(
    build: Callable[..., subprocess.CompletedProcess[str]],
) -> None:
    unquantised = build("{compare: {text: genesis.txt, max_kl: 1.0}}")
    assert unquantised.returncode == 2
    assert "gate: given, and neither quantisation nor kv_cache" in unquantised.stderr
    missing = build("{compare: {text: absent.txt, max_kl: 1.0}}", *QUANTISED)
    assert missing.returncode == 2
    assert "gate.compare.text: given absent.txt" in missing.stderr
    too_long = build("{retrieval: {contexts: [65], max_drop: 1.0}}", *QUANTISED)
    assert too_long.returncode == 2
    assert "gate.retrieval.contexts: given [65]; at most" in too_long.stderr
    for done in (unquantised, missing, too_long):
        assert "trace and passes" not in done.stderr
